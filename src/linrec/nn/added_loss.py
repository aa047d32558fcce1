"""A loss whose gradient joins the backward pass of another loss."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from linrec.ops.core.ambient import Ambient

__all__ = ["weighing_losses", "with_loss"]

_WEIGHT: Ambient[float | Tensor] = Ambient("weight of added losses", 1.0)


def with_loss(y: Float[Tensor, "*shape"], loss: Float[Tensor, ""]) -> Float[Tensor, "*shape"]:
    """Return y; a backward pass through y also adds the gradient of `loss`, for any gradient of y.

    So a layer trains with its own loss in any model and training loop. The gradient of `loss` is not
    multiplied by a loss scale. `weighing_losses` divides the gradient by the steps of accumulation.

    Args:
        y: an output of the layer, that the model's loss depends on.
        loss: a scalar.
    """
    joined: Tensor = _WithLoss.apply(y, _WEIGHT.get() * loss)
    return joined


def weighing_losses(weight: float | Tensor) -> AbstractContextManager[float | Tensor]:
    """Multiply losses that are added within by `weight`: 1 / n for each of n micro-batches.

    The gradients of n micro-batches then add up to the gradient of the batch, for a loss that is a mean over
    as many steps in each. It holds for this thread, and for layers that run again in the backward pass of a
    model with `recompute`. In compiled models, layers with a loss are graph breaks within.

    Args:
        weight: the factor, a number or a scalar tensor. It replaces the factor of a context around this one.
    """
    return _WEIGHT.set(weight, compiled=isinstance(weight, Tensor) or weight != 1)


class _WithLoss(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(y: Tensor, loss: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.dtype, ctx.device = inputs[1].dtype, inputs[1].device

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], torch.ones((), dtype=ctx.dtype, device=ctx.device)
