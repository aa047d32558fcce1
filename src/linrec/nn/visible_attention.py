"""Softmax attention to keys that a mask selects, with a bias on scores."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from linrec.ops.attention.torch import aligned
from linrec.ops.core.call import zeros_of

__all__ = ["visible_attention"]


def visible_attention(
    q: Float[Tensor, "b t h dk"],
    k: Float[Tensor, "b s h dk"],
    v: Float[Tensor, "b s h dv"],
    visible: Bool[Tensor, "#b t s"] | None = None,
    bias: Float[Tensor, "b h t s"] | None = None,
    *,
    causal: bool = True,
    dropout: float = 0.0,
) -> Float[Tensor, "b t h dv"]:
    """Attend to visible keys by torch's fused kernels.

        o_n = sum_m softmax_m(q_n . k_m / sqrt(dk) + b_nm) v_m

    Args:
        q: queries (b, t, h, dk).
        k: keys (b, s, h, dk).
        v: values (b, s, h, dv).
        visible: whether a query sees a key (b or 1, t, s). A query must see at least one key. None is the
            mask of `causal`.
        bias: b (b, h, t, s), or None.
        causal: without `visible`, whether a query sees the keys up to its own step, with t = s, or all keys.
        dropout: probability of dropping an attention weight.

    Returns:
        o (b, t, h, dv).

    Example:
        >>> v = torch.tensor([1.0, 3.0]).reshape(1, 2, 1, 1)
        >>> visible_attention(0 * v, v, v).flatten()
        tensor([1., 2.])
    """
    shape = *q.shape[:3], v.shape[-1]
    if 0 in shape:
        # on CUDA the kernels return no tensor for empty inputs
        return zeros_of(shape, v.dtype, (q, k, v))
    if causal and visible is None and bias is not None:
        visible = torch.ones(1, *bias.shape[2:], dtype=torch.bool, device=bias.device).tril()
    mask = None if visible is None else visible[:, None]
    if bias is not None:
        mask = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
    if q.device.type == "cuda":
        q, k, v = aligned(q), aligned(k), aligned(v)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal and mask is None
    )
    return o.transpose(1, 2)
