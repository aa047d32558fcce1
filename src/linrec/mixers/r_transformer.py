"""R-Transformer (Wang, Ma, Liu and Tang, 2019): a recurrent network in a short window, then attention.

    u_t = h_t + LocalRNN(LN(h_{t-M+1}), LN(h_{t-M+2}), .., LN(h_t))          for each local network
    y_t = u_t + MultiHead(LN(u_1), LN(u_2), .., LN(u_t))

h is the input x of the first local network, and u of the network before for the others. LocalRNN starts at
zero in every window of M steps and gives its last output; steps before the sequence are zeros. MultiHead is
causal softmax attention, LN a norm and t time. A block adds channel mixing.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from linrec.mixers import build, canonical, get
from linrec.mixers.attention import Attention, Positions
from linrec.nn.mixer import Mixer, State
from linrec.nn.norms import Norm, make_norm
from linrec.nn.parameters import tensor_options
from linrec.nn.positions import AttentionState
from linrec.ops.core.isolation import documents
from linrec.rules import COUNT, at_least

__all__ = ["RTransformer", "RTransformerState"]


class RTransformerState(NamedTuple):
    """The state of R-Transformer between two pieces of a sequence.

    Attributes:
        steps: for each local network, LN(h) of the last M - 1 steps (b, M - 1, d_model); steps before the
            row's sequence are zeros.
        attention: the state of the attention.
    """

    steps: tuple[Float[Tensor, "b m d_model"], ...]
    attention: AttentionState


class RTransformer(Mixer):
    """u_t = h_t + LocalRNN(LN(h_{t-M+1}), .., LN(h_t)), then attention over u, less x.

    Local networks give attention the order of steps, so there are no positions. All windows run in parallel,
    so the cost of a local network is M times that of one pass over the sequence.

    The paper's layer has its skip connections inside. Here a block adds x, so the mixer returns y - x. Each
    sublayer has its own norm, and a pre-norm block leaves out the norm before the mixer.

    The state is M - 1 steps of each local network, and the cache of attention, which grows with every step.
    Inspection shows attention alone.

    Args:
        d_model: width of the sequence.
        window: M, the steps of a window.
        n_rnns: local networks before the attention.
        rnn: name of the mixer that is the local network: the paper's "gru", "lstm" or "elman", or any other.
        rnn_args: keyword arguments of that mixer.
        n_heads: heads of the attention. None is the largest number that divides `d_model` and leaves at least
            64 channels to each head, or 1.
        positions: of the attention, "none", "rotary" or "alibi".
        bias: whether the projections of the attention have biases.
        norm: norm of each sublayer's input, "layer", "rms" or "none".
        norm_eps: epsilon of the norms.
        dropout: probability that a share of attention, or a channel of the output of a local network or of
            the attention, is dropped, in training alone. If it is above 0, a block does not drop channels of
            the mixer's output once more.

    Raises:
        ValueError: `n_heads` that does not divide `d_model`, an unknown name, or a number out of range.

    Source:
        Wang, Ma, Liu and Tang, R-Transformer: Recurrent Neural Network Enhanced Transformer (2019), section
        3. The order of norms and skip connections is the released code's.

    Example:
        >>> mixer = RTransformer(64, window=7, n_heads=4)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.steps[0].shape, state.attention.cache.k.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 6, 64]), torch.Size([2, 10, 4, 16]))
    """

    recurrence = "softmax_attention"
    own_norm = True

    takes_turns = True

    def __init__(
        self,
        d_model: int,
        *,
        window: int = 7,
        n_rnns: int = 1,
        rnn: str = "gru",
        rnn_args: dict[str, Any] | None = None,
        n_heads: int | None = None,
        positions: Positions = "none",
        bias: bool = True,
        norm: Norm = "layer",
        norm_eps: float = 1e-5,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(d_model)
        at_least(1, most=COUNT, window=window, n_rnns=n_rnns)
        at_least(0, norm_eps=norm_eps)
        self.window, self.dropout, self.own_dropout = window, dropout, dropout > 0
        name = canonical(rnn, what="`rnn`")
        self.rnns = nn.ModuleList(build(get(name), d_model, **rnn_args or {}) for _ in range(n_rnns))
        self.rnn_norms = nn.ModuleList(make_norm(norm, d_model, eps=norm_eps) for _ in range(n_rnns))
        self.attention = Attention(d_model, n_heads=n_heads, positions=positions, bias=bias, dropout=dropout)
        self.attention_norm = make_norm(norm, d_model, eps=norm_eps)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y less x, and an `RTransformerState`."""
        past = self.init_state(x.shape[0], device=x.device) if state is None else state
        u, tails = x, []
        for rnn, norm, tail in zip(self.rnns, self.rnn_norms, past.steps, strict=True):
            windows, tail = self._windows(norm(u), tail, reset)
            h, _ = rnn(windows.flatten(0, 1))
            last = h[:, -1].unflatten(0, u.shape[:2])
            u = u + self._dropped(last)
            tails.append(tail)
        attended, attention = self.attention(self.attention_norm(u), past.attention, reset=reset)
        return u - x + self._dropped(attended), RTransformerState(tuple(tails), attention)

    def _dropped(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout, self.training)

    def _windows(
        self, x: Tensor, tail: Tensor, reset: Bool[Tensor, "b t"] | None
    ) -> tuple[Float[Tensor, "b t M d"], Float[Tensor, "b m d"]]:
        """Return the window of every step, zeros before the step's sequence, and the last M - 1 steps."""
        time, joined = x.shape[1], torch.cat([tail.to(x.dtype), x], 1)
        step = torch.arange(time, device=x.device)[:, None] + torch.arange(self.window, device=x.device)
        windows = joined[:, step]
        last = joined[:, time:]
        if reset is not None:
            document = functional.pad(documents(reset), (self.window - 1, 0))
            of_windows = document[:, step]
            windows = windows.masked_fill((of_windows != of_windows[..., -1:])[..., None], 0)
            last = last.masked_fill((document != document[:, -1:])[:, time:, None], 0)
        return windows, last.to(tail.dtype, copy=True)

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> State:
        """Return steps of zeros, and the initial state of attention."""
        factory = tensor_options(self.attention.q, device)
        steps = tuple(torch.zeros(batch, self.window - 1, self.d_model, **factory) for _ in self.rnns)
        return RTransformerState(steps, self.attention.init_state(batch, device=device))

    @property
    def state_size(self) -> int:
        """Elements per step that attention caches. Windows, which do not grow, are not counted."""
        return self.attention.state_size
