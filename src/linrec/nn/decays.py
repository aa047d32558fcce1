"""Decays: constants of heads, step sizes of selective state spaces, and HGRN's learned lower bounds."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.parameters import Float32Module, mark
from linrec.rules import choice, require, span

__all__ = [
    "LowerBoundKind",
    "LowerBounds",
    "alibi_slopes",
    "bound_of",
    "make_lower_bounds",
    "multi_scale_decay",
    "share_lower_bounds",
    "softplus",
    "step_bias",
    "xpos_decays",
]

LowerBoundKind = Literal["increasing", "decreasing", "random"]


def multi_scale_decay(
    n_heads: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Float[Tensor, "h"]:
    """log gamma, gamma = 1 - 2^(-5 - arange(0, h)): heads that forget over 32, 64, 128, ... steps.

    Source:
        RetNet (Sun and others, 2023), eq. 8.
    """
    exponent = torch.arange(5, 5 + n_heads, dtype=dtype or torch.get_default_dtype(), device=device)
    return torch.log1p(-(2.0**-exponent))


def alibi_slopes(
    n_heads: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Float[Tensor, "h"]:
    """s_h = 2^(-8 h / H) for h = 1 .. H, where the number of heads H is a power of two.

    Otherwise the first P heads have the slopes of P heads, P the largest power of two below H. The other
    heads have the slopes 2^(-4 / P), 2^(-12 / P), .., every second one of 2 P heads.

    Source:
        Press, Smith and Lewis, Train Short, Test Long: Attention with Linear Biases (2022), and its code for
        other numbers of heads.
    """
    power = 2 ** (n_heads.bit_length() - 1)
    head = torch.arange(n_heads, dtype=dtype or torch.get_default_dtype(), device=device)
    exponent = torch.where(head < power, 8 * (head + 1), 8 * (head - power) + 4)
    return 2.0 ** (-exponent / power)


def xpos_decays(
    d_head: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Float[Tensor, "d_head"]:
    """log(zeta_j) / 512, zeta_j = (2j / d_head + 0.4) / 1.4, for both channels of pair j, counted from 0.

    Source:
        Sun and others, A Length-Extrapolatable Transformer (2022), algorithm 1, and the scale of its code.
    """
    pair = torch.arange(0, d_head, 2, dtype=dtype or torch.get_default_dtype(), device=device)
    return (((pair / d_head + 0.4) / 1.4).log() / 512).repeat_interleave(2)


def softplus(z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return log(1 + exp(z)) as -log sigmoid(-z).

    torch 2.13 compiles the gradient of its own softplus with wrong strides.
    """
    return -functional.logsigmoid(-z)


def step_bias(n: int, dt_init: tuple[float, float], *, floor: float = 0.0) -> Float[Tensor, "n"]:
    """Draw b with softplus(b) log-uniform in `dt_init`, but at least `floor`.

    Args:
        n: step sizes.
        dt_init: (low, high), range of the step sizes.
        floor: smallest step size.

    Source:
        Gu and Dao, Mamba (2023), section 3.6; the floor is the released code's.
    """
    span(0, math.inf, dt_init=dt_init, cure="A step of zero never moves; Mamba's are 0.001 and 0.1.")
    low, high = map(math.log, dt_init)
    dt = torch.exp(torch.empty(n).uniform_(low, high)).clamp(min=floor)
    # softplus backwards
    return dt + torch.log(-torch.expm1(-dt))


class LowerBounds(Float32Module):
    """gamma^k = sum_{i=2..k} P_i with P = Softmax(Gamma) over H layers: the bounds of layer k.

    That is, for each channel, the cumulative sum over the layers minus its first row: 0 for the first layer,
    rising, and below 1 for the last. All layers of a stack hold the same module, and each layer reads its own
    row.

    | `kind`       | bound of layer k of H                     | when training starts |
    |--------------|-------------------------------------------|----------------------|
    | "increasing" | gamma^k                                   | (k - 1) / H          |
    | "decreasing" | gamma^(H + 1 - k)                         | (H - k) / H          |
    | "random"     | Sigmoid(Gamma_k), each layer on its own   | uniform in (0, 1)    |

    The paper names the last two kinds without a formula; the formulas here are the simplest that fit its
    words. Gamma is marked as group "transition" without weight decay, unlike in the paper.

    Args:
        n_layers: layers H of the stack.
        width: channels d.
        kind: "increasing", "decreasing" or "random".

    Raises:
        ValueError: there is no such kind; the message names the nearest.

    Source:
        HGRN (Qin, Yang and Zhong, 2023), section 3.2, "Lower bound on forget gate values"; the kinds are in
        table 10.

    Example:
        >>> bounds = LowerBounds(4, width=2)
        >>> [bounds(layer)[0].item() for layer in range(4)]
        [0.0, 0.25, 0.5, 0.75]
    """

    def __init__(self, n_layers: int, width: int, kind: LowerBoundKind = "increasing") -> None:
        super().__init__()
        choice(LowerBoundKind, kind=kind)
        self.n_layers, self.kind = n_layers, kind
        start = torch.logit(torch.rand(n_layers, width), eps=1e-6) if kind == "random" else None
        self.gamma = nn.Parameter(torch.zeros(n_layers, width) if start is None else start)
        mark(self, "gamma")
        self.keep_float32("gamma")

    def forward(self, layer: int) -> Float[Tensor, "d"]:
        """Return the bounds (d,) in [0, 1) of a layer, counted from 0, in float32 or better."""
        # in bfloat16 a bound near 1 would be 1, and the layer would never forget
        gamma = self.gamma.to(torch.promote_types(self.gamma.dtype, torch.float32))
        if self.kind == "random":
            return torch.sigmoid(gamma[layer])
        if self.kind == "decreasing":
            layer = self.n_layers - 1 - layer
        row = torch.arange(self.n_layers, device=gamma.device)[:, None]
        # a mask has one shape for all layers, so that compiled code serves them all at full speed;
        # leaving the first row out of the sum makes the first bound exactly zero
        return torch.softmax(gamma, 0).masked_fill((row < 1) | (row > layer), 0).sum(0)

    if TYPE_CHECKING:
        __call__ = forward


# tests check annotations by isinstance
@runtime_checkable
class _Bounded(Protocol):
    lower_bound: LowerBoundKind | float
    bounds: LowerBounds | None
    layer: int


def make_lower_bounds(lower_bound: LowerBoundKind | float, width: int) -> LowerBounds | None:
    """Return the bounds of a layer that stands alone; None for a number, which is not learned.

    Args:
        lower_bound: "increasing", "decreasing", "random", or a number in [0, 1).
        width: channels d.
    """
    if isinstance(lower_bound, str):
        choice(LowerBoundKind, lower_bound=lower_bound)
        return LowerBounds(1, width, lower_bound)
    require(
        0 <= lower_bound < 1,
        f"`lower_bound` must be a number in [0, 1); got {lower_bound}. "
        "A bound of 1 would never forget and take no input.",
    )
    return None


def bound_of(mixer: _Bounded, like: Tensor) -> Float[Tensor, "d"]:
    """Return the lower bounds (d,) of the mixer's layer.

    Args:
        mixer: a mixer with lower bounds.
        like: a tensor (.., d) of the dtype and device of bounds that are not learned.
    """
    if mixer.bounds is not None:
        return mixer.bounds(mixer.layer)
    return like.new_full(like.shape[-1:], float(mixer.lower_bound))


def share_lower_bounds(layers: Sequence[_Bounded], like: Tensor) -> None:
    """Make lower bounds with a row for each layer, and give every layer the same module.

    Its parameter (layers, channels) replaces the parameters that the layers had as stacks of one. Nothing
    changes where `lower_bound` is a number.

    Args:
        layers: mixers with lower bounds, first layer first.
        like: a tensor with the device and dtype of the bounds.
    """
    of = {(None if m.bounds is None else m.bounds.gamma.shape[-1], m.lower_bound) for m in layers}
    require(
        len(of) == 1,
        "`layers` must have one number of channels and one `lower_bound` to share bounds; "
        f"got {sorted(of, key=str)}. Build them with equal arguments.",
    )
    ((width, kind),) = of
    if width is not None and isinstance(kind, str):
        bounds = LowerBounds(len(layers), width, kind).to(like.device, like.dtype)
        for layer, mixer in enumerate(layers):
            mixer.bounds, mixer.layer = bounds, layer
