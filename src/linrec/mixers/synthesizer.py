"""Synthesizer: Rethinking Self-Attention for Transformer Models (Tay and others, 2021).

    Y_i = sum_j softmax_j(B_ij) G(X)_j           G(X) = X W_v
    dense                  B_i = W_2 relu(W_1 X_i + b_1) + b_2
    random                 B = R
    factorized dense       B_ij = a(X_i)_{j mod a} c(X_i)_{j div a},   a and c linear, a c = N
    factorized random      B = R_1 R_2^T
    attention              B_ij = q_i . k_j / sqrt(d_head)
    mixture of two         B = alpha_1 B^1 + alpha_2 B^2,   alpha a softmax of two learned numbers

X input, B scores of a head, N largest length, R (N, N), R_1 and R_2 (N, k) learned, i and j steps. But for
"attention", no score depends on step j: all weights are a function of positions and of the step itself.
"""

import math
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from linrec.nn.head_sizes import split_width
from linrec.nn.mixer import Mixer, State
from linrec.nn.parameters import mark, tensor_options
from linrec.nn.projections import output_kwargs
from linrec.nn.seen_steps import SeenSteps
from linrec.ops.inspection import note, noting
from linrec.rules import at_least, divisor, require

__all__ = ["Synthesizer", "SynthesizerState"]

Scores = Literal["dense", "random", "factorized_dense", "factorized_random", "attention"]
SecondScores = Literal["dense", "random", "factorized_dense", "factorized_random", "attention", "none"]

CHANNELS_PER_HEAD = 64


class SynthesizerState(NamedTuple):
    """The state of a `Synthesizer` between two pieces of a sequence: all steps so far.

    Attributes:
        v: values (b, n, h, d_head).
        position: of each step in its sequence, (b, n) int64; -1 where a reset has cut the step off.
        k: keys (b, n, h, d_head) of "attention"; None without it.
    """

    v: Float[Tensor, "b n h d"]
    position: Int[Tensor, "b n"]
    k: Float[Tensor, "b n h d"] | None


class Synthesizer(Mixer):
    """Y_i = sum_j softmax_j(B_ij) v_j, with scores B that are learned, or computed from X_i alone.

    Scores have N columns, one for each position of a sequence. Positions from N on have the row and the
    column of the last one, so that longer sequences run; the paper has no such sequences. Time and memory are
    quadratic in the length. The state is a cache of values that grows with every step. Positions start again
    at a reset.

    | the paper's model | arguments |
    |---|---|
    | Syn (D), Syn (R) | `scores="dense"`, "random" |
    | Syn (FD), Syn (FR) | `scores="factorized_dense"`, "factorized_random" |
    | fixed Syn (R) | `scores="random", learned=False` |
    | Syn (R + V), Syn (D + V) | `scores="random"`, "dense", with `second="attention"` |
    | Syn of HGRN's table 1 | `n_heads=1, value_projection=False, output_projection=False` |

    R starts as standard normal numbers. R_1 and R_2 start normal, with a variance of 1 / sqrt(k), so that
    R_1 R_2^T has a variance of 1. The paper gives no distribution. Both alpha start as 1/2.

    Args:
        d_model: width of the sequence.
        scores: B, a name of the equations.
        second: the other B of a mixture; "none" has no mixture.
        n_heads: heads. None is the largest number that divides `d_model` and leaves at least 64 channels to
            each head, or 1.
        max_length: N.
        d_hidden: channels of W_1 in each head. None is those of a value.
        factor: a, which must divide `max_length`. None is the largest divisor up to sqrt(N).
        rank: k of "factorized_random".
        learned: whether R, R_1 and R_2 are learned.
        value_projection: whether there is W_v; without it a value is the input itself.
        output_projection: whether a Linear follows the heads.
        bias: whether the linear layers have biases.
        causal: whether steps see the past alone. With False, a step sees its whole document, and there is no
            state.

    Raises:
        ValueError: an unknown name, equal `scores` and `second`, a number below 1, or a `factor` that does
            not divide `max_length`.

    Source:
        Synthesizer (Tay and others, 2021), section 3: table 1 lists the variants. `max_length` is 512 in the
        authors' code, and `rank` 8 in the paper.

    Example:
        >>> mixer = Synthesizer(64, max_length=32)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.v.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 10, 1, 64]))
    """

    takes_turns = True

    def __init__(
        self,
        d_model: int,
        *,
        scores: Scores = "dense",
        second: SecondScores = "none",
        n_heads: int | None = None,
        max_length: int = 512,
        d_hidden: int | None = None,
        factor: int | None = None,
        rank: int = 8,
        learned: bool = True,
        value_projection: bool = True,
        output_projection: bool = True,
        bias: bool = True,
        causal: bool = True,
    ) -> None:
        super().__init__(d_model)
        require(scores != second, f'`second` must differ from `scores`; got {second!r}. Pass "none".')
        at_least(1, max_length=max_length, rank=rank)
        at_least(1, d_hidden=d_hidden, factor=factor, or_none=True)
        h, d = self.heads = split_width("d_model", d_model, n_heads, least=CHANNELS_PER_HEAD)
        self.scores = (scores,) if second == "none" else (scores, second)
        self.max_length, self.causal, N = max_length, causal, max_length
        if "dense" in self.scores:
            hidden = d if d_hidden is None else d_hidden
            self.hidden = nn.Linear(d_model, h * hidden, bias=bias)
            self.dense = nn.Parameter(torch.empty(h, N, hidden).uniform_(-1, 1) / math.sqrt(hidden))
            self.dense_bias = nn.Parameter(torch.zeros(h, N)) if bias else None
        if "factorized_dense" in self.scores:
            largest = next(a for a in range(math.isqrt(N), 0, -1) if N % a == 0)
            self.factor = largest if factor is None else factor
            divisor("max_length", N, factor=self.factor, cure="The columns are a grid of both factors.")
            self.a = nn.Linear(d_model, h * self.factor, bias=bias)
            self.c = nn.Linear(d_model, h * (N // self.factor), bias=bias)
        if "random" in self.scores:
            self.R = nn.Parameter(torch.randn(h, N, N), requires_grad=learned)
        if "factorized_random" in self.scores:
            self.R_1, self.R_2 = (
                nn.Parameter(torch.randn(h, N, rank) / rank**0.25, requires_grad=learned) for _ in range(2)
            )
        if "attention" in self.scores:
            self.q, self.k = (nn.Linear(d_model, d_model, bias=bias) for _ in range(2))
        if second != "none":
            self.alpha = nn.Parameter(torch.zeros(2))
        self.v = nn.Linear(d_model, d_model, bias=bias) if value_projection else nn.Identity()
        self.out = nn.Linear(d_model, d_model, bias=bias) if output_projection else nn.Identity()
        for name in ("dense", "dense_bias", "R", "R_1", "R_2", "alpha"):
            if getattr(self, name, None) is not None:
                mark(self, name, group="channel", weight_decay=name == "dense")

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return Y, and a `SynthesizerState`, None without `causal`."""
        past = self._empty(x.shape[0], x.device) if state is None else state
        v = torch.cat([past.v, self.v(x).to(past.v.dtype).unflatten(-1, self.heads)], 1)
        k = None
        if past.k is not None:
            k = torch.cat([past.k, self.k(x).to(past.k.dtype).unflatten(-1, self.heads)], 1)
        seen = SeenSteps(past.position, x.shape[1], reset=reset, causal=self.causal)
        own, values = seen.entered(x, carried=False), seen.entered(v)
        B = [self._scores(name, own, None if k is None else seen.entered(k), seen) for name in self.scores]
        mixed = B[0]
        if len(B) > 1:
            alpha = self.alpha.softmax(0)
            mixed = alpha[0] * B[0] + alpha[1] * B[1]
        mixed = mixed.to(torch.promote_types(v.dtype, torch.float32))
        share = mixed.masked_fill(~seen.visible[:, None], -torch.inf).softmax(-1)
        note(share=share)
        Y = seen.left(torch.einsum("bhij,bjhd->bihd", share.to(v.dtype), values).flatten(-2))
        y = self.out(Y.to(x.dtype))
        if not self.causal:
            return y, None
        return y, SynthesizerState(seen.kept(v), seen.kept_position, None if k is None else seen.kept(k))

    def _scores(self, name: str, x: Tensor, k: Tensor | None, seen: SeenSteps) -> Tensor:
        """Return B of new steps with cached and new steps, (b, h, i, j)."""
        i, j = seen.new.clamp(max=self.max_length - 1), seen.position.clamp(0, self.max_length - 1)
        h, d = self.heads
        if name == "attention":
            return torch.einsum("bihd,bjhd->bhij", self.q(x).unflatten(-1, self.heads), k) / math.sqrt(d)
        if name == "random":
            return self.R[:, i[:, :, None], j[:, None]].transpose(0, 1)
        if name == "factorized_random":
            return torch.einsum("hbik,hbjk->bhij", self.R_1[:, i], self.R_2[:, j])
        if name == "dense":
            hidden = torch.relu(self.hidden(x)).unflatten(-1, (h, -1))
            rows = torch.einsum("bihd,hnd->bhin", hidden, self.dense.to(hidden.dtype))
            rows = rows if self.dense_bias is None else rows + self.dense_bias[:, None]
        else:
            a, c = (layer(x).unflatten(-1, (h, -1)).transpose(1, 2) for layer in (self.a, self.c))
            rows = (c[..., :, None] * a[..., None, :]).flatten(-2)
        return rows.gather(-1, j[:, None, None].expand(-1, h, i.shape[1], -1))

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> State:
        """Return a cache of no steps; None without `causal`."""
        return self._empty(batch, device) if self.causal else None

    def _empty(self, batch: int, device: torch.device | str | None) -> SynthesizerState:
        """Return a cache of no steps in the dtype of the values."""
        linear = isinstance(self.v, nn.Linear)
        factory = output_kwargs(self.v, device) if linear else tensor_options(self, device)
        none = torch.zeros(batch, 0, *self.heads, **factory)
        position = torch.zeros(batch, 0, dtype=torch.int64, device=none.device)
        return SynthesizerState(none, position, none.clone() if "attention" in self.scores else None)

    @property
    def is_causal(self) -> bool:
        """Whether steps see the past alone."""
        return self.causal

    @property
    def state_size(self) -> int:
        """Elements per cached step: a value, a position, and a key of "attention"."""
        return (self.d_model * (1 + ("attention" in self.scores)) + 1) if self.causal else 0

    def token_mixing(self, x: Tensor, *, reset: Tensor | None = None) -> Tensor:
        """Return the softmax of the scores, the mean over heads."""
        with noting() as noted:
            self.forward(x, reset=reset)
        return noted["share"].mean(1)
