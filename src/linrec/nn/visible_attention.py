"""Softmax attention to keys that a mask selects, with a bias on scores."""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from linrec.ops.attention.torch import Softmax, aligned, softmax
from linrec.ops.core.call import zeros_of

__all__ = ["fitting", "padded", "visible_attention"]


def alignment(x: Tensor) -> int:
    """Return the number that must divide channels and keys for torch's fused kernels with a mask.

    With another number of channels torch stores all scores in float32, and with another number of keys it
    copies the mask.
    """
    return 8 if x.device.type == "cuda" else 1


def fitting(size: int, x: Tensor) -> int:
    """Return a number of channels or keys, rounded up for torch's fused kernels on the device of x.

    Example:
        >>> fitting(41, torch.zeros(1))
        41
    """
    multiple = alignment(x)
    return -(-size // multiple) * multiple


def padded(x: Tensor, size: int, axis: int = -1) -> Tensor:
    """Return the tensor with zeros behind it, up to a size of an axis; the tensor itself if it has the size.

    Example:
        >>> padded(torch.ones(3), 4)
        tensor([1., 1., 1., 0.])
    """
    missing = size - x.shape[axis]
    return functional.pad(x, (0, 0) * (-1 - axis) + (0, missing)) if missing else x


def visible_attention(
    q: Float[Tensor, "b t h dk"],
    k: Float[Tensor, "b s h dk"],
    v: Float[Tensor, "b s h dv"],
    visible: Bool[Tensor, "#b t s"] | None = None,
    bias: Float[Tensor, "#b h t n"] | None = None,
    *,
    causal: bool = True,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "b t h dv"]:
    """Attend to visible keys by torch's fused kernels.

        o_n = sum_m softmax_m(scale q_n . k_m + b_nm) v_m

    The kernels get one mask in the dtype of `q`, which is b where a key is visible and -inf elsewhere. On
    CUDA, channels and keys are padded to multiples of 8 for it.

    Args:
        q: queries (b, t, h, dk).
        k: keys (b, s, h, dk).
        v: values (b, s, h, dv).
        visible: whether a query sees a key (b or 1, t, s). A query must see at least one key. None is the
            mask of `causal`.
        bias: b (b or 1, h, t, n), n >= s, or None; columns after s are ignored. With a bias, the mask is a
            tensor (b, h, t, n), which is kept for the backward pass.
        causal: without `visible`, whether a query sees the keys up to its own step, with t = s, or all keys.
        scale: factor on products; None is 1 / sqrt(dk).
        dropout: probability of dropping an attention weight.

    Returns:
        o (b, t, h, dv).

    Example:
        >>> v = torch.tensor([1.0, 3.0]).reshape(1, 2, 1, 1)
        >>> visible_attention(0 * v, v, v).flatten()
        tensor([1., 2.])
    """
    shape, keys, width = (*q.shape[:3], v.shape[-1]), k.shape[1], v.shape[-1]
    if 0 in shape:
        # on CUDA the kernels return no tensor for empty inputs
        return zeros_of(shape, v.dtype, (q, k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    mask = None if visible is None else visible[:, None]
    if bias is not None:
        n = fitting(max(keys, bias.shape[-1]), q)
        if mask is None:
            mask = torch.ones(1, 1, q.shape[1], keys, dtype=torch.bool, device=q.device)
            mask = mask.tril() if causal else mask
        mask = torch.where(padded(mask, n), padded(bias.to(q.dtype), n), -torch.inf)
        k, v = padded(k, n, -3), padded(v, n, -3)
    if mask is not None:
        channels = fitting(q.shape[-1], q)
        q, k, v = padded(q, channels), padded(k, channels), padded(v, fitting(width, v))
    if q.device.type == "cuda":
        q, k, v = aligned(q), aligned(k), aligned(v)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o = softmax(Softmax(q, k, v, mask, causal and mask is None, scale), dropout)
    return o.transpose(1, 2)[..., :width]
