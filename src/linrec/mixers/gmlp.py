"""gMLP: Pay Attention to MLPs (Liu and others, 2021), and aMLP, gMLP with a tiny attention.

    U = gelu(X W_1 + b_1)     Z_1, Z_2 = split(U)
    f(Z_2) = W_s LN(Z_2) + b_s
    Y = (Z_1 * f(Z_2)) W_2 + b_2
    aMLP: f(Z_2) = W_s LN(Z_2) + b_s + softmax(M_-inf(Q K^T / sqrt(d_attention))) V W_3,   Q, K, V = X W_4

X input, W_s (N, N) a matrix over time, which all channels share, b_s a number for each position, * the
product of channels, M_-inf the causal mask. The causal form has the lower triangle of W_s. The layer takes
the place of attention and channel mixing; norm and skip connection are those of the block.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.mixer import Mixer, State
from linrec.nn.norms import LayerNorm
from linrec.nn.parameters import mark
from linrec.nn.projections import output_kwargs
from linrec.nn.seen_steps import SeenSteps
from linrec.ops.attention import AttentionCache, softmax_attention
from linrec.ops.inspection import note, noting
from linrec.rules import at_least, require

__all__ = ["GMLP", "GMLPState"]

# of W_s when training starts, over N
EPSILON = 1e-3


class GMLPState(NamedTuple):
    """The state of a `GMLP` between two pieces of a sequence: all steps so far.

    Attributes:
        z: LN(Z_2) of each step (b, n, d_inner / 2).
        position: of each step in its sequence, (b, n) int64; -1 where a reset has cut the step off.
        cache: of the tiny attention; None without it.
    """

    z: Float[Tensor, "b n d"]
    position: Int[Tensor, "b n"]
    cache: AttentionCache | None


class GMLP(Mixer):
    """Y = (Z_1 * (W_s LN(Z_2) + b_s)) W_2 + b_2, where W_s is a matrix over time.

    Weights of pairs of steps depend on positions alone. W_s starts near zero, uniform in +- 0.001 / N, and
    b_s as ones, so that the layer starts as an MLP of each step. Positions from N on take no part: no step
    reaches them, they reach no step, and their bias is the last of b_s. Positions start again at a reset. The
    state is a cache that grows with every step; time is quadratic in the length.

    Use it with `channel_mixing="none"`: the layer is a whole block of the paper.

    | model | arguments |
    |---|---|
    | gMLP of the paper, not causal | `causal=False` |
    | aMLP | `d_attention=64` |
    | gMLP of HGRN's table 1, whose code leaves b_s out | `d_inner=2048, spatial_bias=False` of width 512 |

    Args:
        d_model: width of the sequence.
        d_inner: channels of U, even. None is 6 `d_model`, as in the paper.
        max_length: N.
        d_attention: channels of the tiny attention, which has a single head; None has no attention. The
            paper's are 64.
        spatial_bias: whether there is b_s.
        causal: whether steps see the past alone. With False, a step sees its whole document, and there is no
            state.

    Raises:
        ValueError: an odd `d_inner`, or a number below 1.

    Source:
        gMLP (Liu, Dai, So and Le, 2021), section 2 and appendix A. The causal form is of HGRN's experiments.

    Example:
        >>> mixer = GMLP(8, max_length=32)
        >>> y, state = mixer(torch.zeros(2, 10, 8))
        >>> y.shape, state.z.shape
        (torch.Size([2, 10, 8]), torch.Size([2, 10, 24]))
    """

    takes_turns = True

    def __init__(
        self,
        d_model: int,
        *,
        d_inner: int | None = None,
        max_length: int = 512,
        d_attention: int | None = None,
        spatial_bias: bool = True,
        causal: bool = True,
    ) -> None:
        super().__init__(d_model)
        at_least(1, max_length=max_length)
        at_least(1, d_attention=d_attention, or_none=True)
        self.d_inner = 6 * d_model if d_inner is None else d_inner
        require(
            self.d_inner >= 2 and self.d_inner % 2 == 0,
            f"`d_inner` must be even, at least 2, to be split; got {self.d_inner}. None is 6 `d_model`.",
        )
        self.max_length, self.d_attention, self.causal = max_length, d_attention, causal
        half = self.d_inner // 2
        self.in_proj = nn.Linear(d_model, self.d_inner)
        self.norm = LayerNorm(half)
        self.W_s = nn.Parameter(torch.empty(max_length, max_length).uniform_(-1, 1) * EPSILON / max_length)
        self.b_s = nn.Parameter(torch.ones(max_length)) if spatial_bias else None
        if spatial_bias:
            mark(self, "b_s", group="channel")
        if d_attention is not None:
            self.qkv = nn.Linear(d_model, 3 * d_attention, bias=False)
            self.attention_out = nn.Linear(d_attention, half)
        self.out = nn.Linear(half, d_model)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return Y, and a `GMLPState`, None without `causal`."""
        past = self._empty(x.shape[0], x.device) if state is None else state
        z1, z2 = functional.gelu(self.in_proj(x)).chunk(2, -1)
        z = torch.cat([past.z, self.norm(z2).to(past.z.dtype)], 1)
        seen = SeenSteps(past.position, x.shape[1], reset=reset, causal=self.causal)
        last = self.max_length - 1
        i, j = seen.new.clamp(max=last), seen.position.clamp(0, last)
        inside = (seen.new <= last)[:, :, None] & (seen.position <= last)[:, None]
        W = self.W_s[i[:, :, None], j[:, None]].masked_fill(~(seen.visible & inside), 0)
        note(W=W, z1=z1)
        gate = seen.left(W.to(z.dtype) @ seen.entered(z))
        if self.b_s is not None:
            gate = gate + self.b_s[i][..., None]
        cache = past.cache
        if self.d_attention is not None:
            q, k, v = self.qkv(x)[:, :, None].chunk(3, -1)
            # a cache of views would hold q too
            k, v = k.clone(), v.clone()
            heads, cache = softmax_attention(
                q, k, v, state=cache if self.causal else None, reset=reset, causal=self.causal
            )
            gate = gate + self.attention_out(heads[:, :, 0])
        y = self.out(z1 * gate.to(z1.dtype))
        if not self.causal:
            return y, None
        return y, GMLPState(seen.kept(z), seen.kept_position, cache)

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> State:
        """Return a cache of no steps; None without `causal`."""
        return self._empty(batch, device) if self.causal else None

    def _empty(self, batch: int, device: torch.device | str | None) -> GMLPState:
        """Return a cache of no steps in the dtype of U."""
        z = torch.zeros(batch, 0, self.d_inner // 2, **output_kwargs(self.in_proj, device))
        position = torch.zeros(batch, 0, dtype=torch.int64, device=z.device)
        if self.d_attention is None:
            return GMLPState(z, position, None)
        sizes, factory = (1, self.d_attention, self.d_attention), output_kwargs(self.qkv, device)
        return GMLPState(z, position, softmax_attention.empty_state(batch, *sizes, **factory))

    @property
    def is_causal(self) -> bool:
        """Whether steps see the past alone."""
        return self.causal

    @property
    def state_size(self) -> int:
        """Elements per cached step: half of U, a position, and a key and a value of the tiny attention."""
        return self.d_inner // 2 + 1 + 2 * (self.d_attention or 0) if self.causal else 0

    def token_mixing(self, x: Tensor, *, reset: Tensor | None = None) -> Tensor:
        """Return the mean over channels of |Z_1 W_s|, without the tiny attention, which has other values."""
        with noting() as noted:
            self.forward(x, reset=reset)
        return noted["z1"].abs().mean(-1)[..., None] * noted["W"].abs()
