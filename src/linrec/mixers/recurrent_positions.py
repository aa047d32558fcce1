"""Recurrent positional embedding (Chen, Wang, Utiyama and Sumita, 2019), before attention.

    x_t = [p_t | s_t]
    r_t = tanh(W s_t + b + U r_{t-1} + c)
    y_t = Attention([p_1 | r_1], .., [p_t | r_t])                              part of each head
    y_t = [Attention(p_1, .., p_t) | Attention(r_1, .., r_t)]                  independent heads

x input, p and s its first and last channels, r recurrent positions, y output, t time, W, U, b and c of a
recurrent network.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from linrec.mixers import build, canonical, get
from linrec.mixers.attention import Attention, Positions
from linrec.nn.mixer import Mixer, State
from linrec.rules import at_least

__all__ = ["RecurrentPositions"]

Heads = Literal["shared", "independent"]


class RecurrentPositions(Mixer):
    """Attention whose last input channels are the states of a recurrent network over these channels.

    Recurrent positions depend on the words and their order. The paper computes them once, from the words'
    embeddings, so the mixer is for the first block of a stack: `mixer=("recurrent_positions", "attention")`
    with as many names as blocks.

    The paper adds sinusoids to p; here `positions` of the attention give the order to p. With independent
    heads, the heads of p and the heads of r each have their own output projection, of as many channels.

    The state is the network's, and the caches of attention, which grow with every step. Inspection shows the
    attention, of independent heads the attention to r.

    Args:
        d_model: width of the sequence.
        d_recurrent: channels of s and r. None is half of `d_model`, rounded down.
        rnn: name of the mixer that is the network: the paper's "elman", or any other.
        rnn_args: keyword arguments of that mixer.
        heads: "shared", where each head reads [p | r], or "independent", where each head reads p or r.
        n_heads: heads of [p | r], or of p. None is the largest number that divides their width and leaves at
            least 64 channels to each head, or 1.
        n_recurrent_heads: heads of r, likewise, for independent heads alone.
        positions: of the heads of [p | r], or of p: "rotary", "alibi", "xpos" or "none".
        bias: whether the projections of the attention have biases.
        dropout: probability that a share of attention is dropped, in training alone.

    Raises:
        ValueError: numbers of heads that do not divide the widths, `d_recurrent` outside 1 to `d_model` - 1,
            an unknown name, or a number out of range.

    Source:
        Chen, Wang, Utiyama and Sumita, Recurrent Positional Embedding for Neural Machine Translation (2019),
        as the survey describes it.

    Example:
        >>> mixer = RecurrentPositions(64, d_recurrent=16, n_heads=4)
        >>> y, (r, (attention,)) = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, r.shape, attention.cache.k.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 16]), torch.Size([2, 10, 4, 16]))
    """

    recurrence: str | None = "softmax_attention"

    def __init__(
        self,
        d_model: int,
        *,
        d_recurrent: int | None = None,
        rnn: str = "elman",
        rnn_args: dict[str, Any] | None = None,
        heads: Heads = "shared",
        n_heads: int | None = None,
        n_recurrent_heads: int | None = None,
        positions: Positions = "rotary",
        bias: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(d_model)
        at_least(2, d_model=d_model)
        at_least(1, most=d_model - 1, d_recurrent=d_recurrent, or_none=True)
        at_least(1, n_recurrent_heads=n_recurrent_heads, or_none=True)
        self.d_recurrent = d_model // 2 if d_recurrent is None else d_recurrent
        self.widths = d_model - self.d_recurrent, self.d_recurrent
        self.rnn = build(get(canonical(rnn, what="`rnn`")), self.d_recurrent, **rnn_args or {})
        independent = heads == "independent"
        common: dict[str, Any] = {"bias": bias, "dropout": dropout}
        width = self.widths[0] if independent else d_model
        self.attention = Attention(width, n_heads=n_heads, positions=positions, **common)
        self.attention_r: Attention | None = None
        if independent:
            self.attention_r = Attention(
                self.d_recurrent, n_heads=n_recurrent_heads, positions="none", **common
            )
        self.recurrence = self._attentions[-1].recurrence

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y, and the states of the network and of each attention."""
        start, caches = (None, (None, None)) if state is None else state
        p, s = x.split(self.widths, -1)
        r, last = self.rnn(s, start, reset=reset)
        if self.attention_r is None:
            y, cache = self.attention(torch.cat([p, r], -1), caches[0], reset=reset)
            return y, (last, (cache,))
        of_p, cache = self.attention(p, caches[0], reset=reset)
        of_r, cache_r = self.attention_r(r, caches[1], reset=reset)
        return torch.cat([of_p, of_r], -1), (last, (cache, cache_r))

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> State:
        """Return the initial states of the network and of each attention."""
        caches = tuple(attention.init_state(batch, device=device) for attention in self._attentions)
        return self.rnn.init_state(batch, device=device), caches

    @property
    def state_size(self) -> int:
        """Elements per step that attention caches. The state of the network is not counted."""
        return sum(attention.state_size for attention in self._attentions)

    @property
    def _attentions(self) -> list[Attention]:
        return [self.attention] if self.attention_r is None else [self.attention, self.attention_r]
