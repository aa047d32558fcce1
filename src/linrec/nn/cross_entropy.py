"""The head and its loss in pieces, so that memory never holds all logits of a large vocabulary."""

from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, autocast
from torch.autograd.function import once_differentiable
from torch.nn import functional

from linrec.nn.head import soft_cap

__all__ = ["linear_cross_entropy"]

IGNORED = -100
# logits at once: 1 GiB in float32
LOGITS = 2**28


def linear_cross_entropy(
    x: Float[Tensor, "*n d"],
    weight: Float[Tensor, "v d"],
    bias: Float[Tensor, "v"] | None,
    targets: Int64[Tensor, "*n"],
    *,
    cap: float | None = None,
    rows: int | None = None,
    label_smoothing: float = 0.0,
) -> tuple[Float[Tensor, ""], Int64[Tensor, "*n"]]:
    """Return the cross-entropy of a linear layer's outputs, summed over the positions that have a target.

        logits_n = W x_n + b, or cap tanh((W x_n + b) / cap)
        loss = sum_n log(sum_v exp(logits_nv)) - logits_n,target_n

    With label smoothing e, the target is a distribution: 1 - e for the class itself, and e shared evenly by
    all v classes. The last term is then (1 - e) logits_n,target_n + e mean_v(logits_nv).

    Where the logits do not fit into one piece, the gradient of each piece is computed together with its loss.
    So no tensor of the size of the logits is kept or computed twice. The gradient of `weight` is summed over
    the pieces in float32 at least. Under autocast, matrix products are in autocast's dtype, all other
    operations in float32.

    Args:
        x: inputs of the layer, (*n, d).
        weight: (v, d).
        bias: (v), or None.
        targets: (*n), int64 in [0, v), or -100 for positions without a target.
        cap: bound of logits, as in `linrec.nn.Head`; None disables it.
        rows: positions in a piece; None makes pieces of 2^28 logits.
        label_smoothing: e, in [0, 1).

    Returns:
        The loss in nats, a scalar in float32 (float64 where the inputs are), and the likeliest class of every
        position, (*n).

    Source:
        The pieces come from Hsu et al., Liger Kernel (2024). Label smoothing: Szegedy and others, Rethinking
        the Inception Architecture (2016), section 7. torch 2.13 has a function of this name that
        returns no predictions.
    """
    shape, kind = targets.shape, x.device.type
    x, targets = x.flatten(0, -2), targets.flatten()
    rows = max(1, LOGITS // weight.shape[0]) if rows is None else rows
    if len(targets) <= rows:
        logits = soft_cap(_wide(functional.linear(x, weight, bias)), cap)
        loss = functional.cross_entropy(
            logits, targets, ignore_index=IGNORED, reduction="sum", label_smoothing=label_smoothing
        )
        return loss, logits.detach().argmax(-1).reshape(shape)
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    loss, predictions = _InPieces.apply(x.to(dtype), weight, bias, targets, cap, rows, label_smoothing)
    return loss, predictions.reshape(shape)


class _InPieces(torch.autograd.Function):
    """loss, predictions = _InPieces.apply(x, weight, bias, targets, cap, rows, label_smoothing)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        cap: float | None,
        rows: int,
        smoothing: float,
    ) -> tuple[Tensor, Tensor]:
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        dweight = torch.zeros_like(weight, dtype=_wide_dtype(weight)) if needs_weight else None
        dbias = torch.zeros_like(bias, dtype=_wide_dtype(bias)) if bias is not None and needs_bias else None
        losses, predictions, dx = [], [], []
        # autocast would replace the dtypes chosen here
        with autocast(x.device.type, enabled=False):
            w = weight.to(x.dtype)
            b = None if bias is None else bias.to(x.dtype)
            for x_piece, targets_piece in zip(x.split(rows), targets.split(rows), strict=True):
                logits = functional.linear(x_piece, w, b)
                loss, best, dlogits = _piece(logits, targets_piece, cap, smoothing)
                losses.append(loss)
                predictions.append(best)
                if needs_x:
                    dx.append(dlogits @ w)
                if dweight is not None:
                    dweight = dweight + dlogits.T @ x_piece
                if dbias is not None:
                    dbias = dbias + dlogits.sum(0, dtype=dbias.dtype)
        ctx.save_for_backward(
            torch.cat(dx) if needs_x else None,
            None if dweight is None else dweight.to(weight.dtype),
            None if dbias is None or bias is None else dbias.to(bias.dtype),
        )
        best = torch.cat(predictions)
        ctx.mark_non_differentiable(best)
        return torch.stack(losses).sum(), best

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return (
            *(None if g is None else g * dloss.to(g.dtype) for g in ctx.saved_tensors),
            None,
            None,
            None,
            None,
        )


def _piece(
    logits: Tensor, targets: Tensor, cap: float | None, smoothing: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, predictions, and the gradient of the loss for the logits before the cap, in their own dtype."""
    wide = soft_cap(_wide(logits), cap)
    top, predictions = wide.max(-1, keepdim=True)
    valid = (targets != IGNORED)[:, None]
    place = targets.clamp(min=0)[:, None]
    given = wide.gather(-1, place)
    if smoothing:
        given = (1 - smoothing) * given + smoothing * wide.mean(-1, keepdim=True)
    slope = None if cap is None else 1 - (wide / cap).square()
    # in place: a tensor of all logits of a piece takes 1 GiB
    exps = wide.sub_(top).exp_()
    total = exps.sum(-1, keepdim=True)
    loss = torch.where(valid, total.log() + top - given, 0).sum()
    hit = torch.arange(logits.shape[-1], device=logits.device) == place
    dlogits = exps.div_(total).add_(hit, alpha=smoothing - 1)
    if smoothing:
        dlogits.sub_(smoothing / logits.shape[-1])
    dlogits.masked_fill_(~valid, 0)
    if slope is not None:
        dlogits.mul_(slope)
    return loss, predictions[:, 0], dlogits.to(logits.dtype)


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _wide(x: Tensor) -> Tensor:
    return x.to(_wide_dtype(x))
