"""Step sizes dt = softplus(z) of selective state spaces."""

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from linrec.rules import span

__all__ = ["heavy_tail", "softplus", "step_bias"]


def softplus(z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return log(1 + exp(z)) as -log sigmoid(-z).

    torch 2.13 compiles the gradient of its own softplus with wrong strides.

    Example:
        >>> round(softplus(torch.zeros(1)).item(), 4)
        0.6931
    """
    return -functional.logsigmoid(-z)


def heavy_tail(z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return 1 + z for z >= 0 and 1 / (1 - z) below: above zero, and falling slower than softplus.

    Source:
        The code released with Mamba-3 (Lahoti and others, 2026), since June 2026.

    Example:
        >>> heavy_tail(torch.tensor([-3.0, 3.0]))
        tensor([0.2500, 4.0000])
    """
    return z.clamp(min=0) + 1 / (1 - z.clamp(max=0))


def step_bias(n: int, dt_init: tuple[float, float], *, floor: float = 0.0) -> Float[Tensor, "n"]:
    """Draw b with softplus(b) log-uniform in `dt_init`, but at least `floor`.

    Args:
        n: step sizes.
        dt_init: (low, high), range of the step sizes.
        floor: smallest step size.

    Raises:
        ValueError: a `dt_init` that is not (low, high) with 0 < low <= high.

    Source:
        Gu and Dao, Mamba (2023), section 3.6; the floor is the released code's.

    Example:
        >>> round(torch.nn.functional.softplus(step_bias(1, (0.1, 0.1))).item(), 4)
        0.1
    """
    span(0, math.inf, dt_init=dt_init, cure="A step of zero never moves; Mamba's are 0.001 and 0.1.")
    low, high = map(math.log, dt_init)
    dt = torch.exp(torch.empty(n).uniform_(low, high)).clamp(min=floor)
    # softplus backwards
    return dt + torch.log(-torch.expm1(-dt))
