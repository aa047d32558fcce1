"""The gate that follows the norm of a mixer's output."""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["gated"]


def gated(
    y: Float[Tensor, "*batch d"],
    gate: nn.Module | None,
    x: Float[Tensor, "*batch d_model"],
    activation: Callable[[Tensor], Tensor] = functional.silu,
) -> Float[Tensor, "*batch d"]:
    """Return activation(W x) * y, or y without a gate.

    Args:
        y: the output to gate.
        gate: W, or None.
        x: input of the gate.
        activation: SiLU, also called Swish, by default.

    Example:
        >>> import torch
        >>> gated(torch.ones(2), None, torch.zeros(3))
        tensor([1., 1.])
        >>> gated(torch.ones(2), nn.Linear(3, 2, bias=False), torch.zeros(3), torch.sigmoid).detach()
        tensor([0.5000, 0.5000])
    """
    return y if gate is None else activation(gate(x)) * y
