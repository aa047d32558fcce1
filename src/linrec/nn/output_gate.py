"""The gate that follows the norm of a mixer's output."""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

__all__ = ["gated"]


def gated(
    y: Float[Tensor, "*batch d"],
    g: Float[Tensor, "*batch d"] | None,
    activation: Callable[[Tensor], Tensor] = functional.silu,
) -> Float[Tensor, "*batch d"]:
    """Return activation(g) * y, or y without a gate.

    Args:
        y: the output to gate.
        g: the gate before its activation, a projection of the mixer's input; or None.
        activation: SiLU, also called Swish, by default.

    Example:
        >>> import torch
        >>> gated(torch.ones(2), None)
        tensor([1., 1.])
        >>> gated(torch.ones(2), torch.zeros(2), torch.sigmoid)
        tensor([0.5000, 0.5000])
    """
    return y if g is None else activation(g) * y
