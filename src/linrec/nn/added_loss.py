"""A loss whose gradient joins the backward pass of another loss."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["with_loss"]


def with_loss(y: Float[Tensor, "*shape"], loss: Float[Tensor, ""]) -> Float[Tensor, "*shape"]:
    """Return y; a backward pass through y adds the gradient of `loss`, whatever the gradient of y is.

    So a layer trains with a loss of its own, in a model and a training loop that do not know of it. The
    gradient is not scaled as the model's loss may be, by a loss scale or by steps of accumulation.

    Args:
        y: an output of the layer, that the model's loss depends on.
        loss: a scalar.

    Example:
        >>> w = torch.ones((), requires_grad=True)
        >>> y = with_loss(torch.ones(3, requires_grad=True), 5 * w)
        >>> y.sum().backward()
        >>> w.grad
        tensor(5.)
    """
    joined: Tensor = _WithLoss.apply(y, loss)
    return joined


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype, ctx.device = loss.dtype, loss.device
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], torch.ones((), dtype=ctx.dtype, device=ctx.device)
