"""Softmax attention within blocks of consecutive steps, DiagAttention of TransNormer."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from linrec.nn.positions import AttentionState, positions
from linrec.ops.attention import AttentionCache, softmax_attention

__all__ = ["block_attention", "first_state"]


def first_state(cache: AttentionCache) -> AttentionState:
    """Return the state at position 0.

    Args:
        cache: an empty one, of `softmax_attention.empty_state`. Its keys have 2 d channels with `theta`, and
            d without.

    Example:
        >>> first_state(softmax_attention.empty_state(1, 1, 1, 1)).position
        tensor([0])
    """
    # later states say which cached steps are in the current block
    alive = cache.k.new_ones(cache.k.shape[:2], dtype=torch.bool)
    return AttentionState.first(cache._replace(alive=alive))


def block_attention(
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b t h d"],
    v: Float[Tensor, "b t h dv"],
    theta: Float[Tensor, "h d"] | None = None,
    *,
    block_size: int,
    state: AttentionState,
    reset: Bool[Tensor, "b t"] | None = None,
) -> tuple[Float[Tensor, "b t h dv"], AttentionState]:
    """Attend to the steps so far of the same block.

        a_st = q_s^T diag(cos(theta (s - t))) k_t / sqrt(d)
        o_s = sum_t softmax_t(a_st) v_t,    t <= s, t in the block of s

    Blocks are counted from the start of each sequence, so from each reset on. A step that begins a block is a
    reset of the attention.

    Args:
        q: queries (b, t, h, d).
        k: keys (b, t, h, d).
        v: values (b, t, h, dv).
        theta: frequencies of the channels (h, d) in radians per step; None is a_st = q_s^T k_t / sqrt(d).
        block_size: steps of a block.
        state: the state that an earlier call returned, or `first_state` of an empty cache.
        reset: (b, t) bool; true where a new sequence starts.

    Returns:
        o (b, t, h, dv) and the state after the last step.

    Source:
        Qin and others, The Devil in Linear Transformer (2022), its DiagAttention.

    Example:
        >>> q, v = torch.ones(1, 4, 1, 1), torch.tensor([1.0, 3.0, 5.0, 7.0]).reshape(1, 4, 1, 1)
        >>> state = first_state(softmax_attention.empty_state(1, 1, 1, 1))
        >>> block_attention(q, q, v, block_size=2, state=state)[0].flatten()
        tensor([1., 2., 5., 6.])
    """
    scale = q.shape[-1] ** -0.5
    position, seen = positions(state.position, q.shape[1], reset=reset)
    step = position % block_size
    if theta is not None:
        # the products of both halves add up to the cosine of the difference
        angle = step[..., None, None] * theta
        q, k = (torch.cat([x * angle.cos(), x * angle.sin()], dim=-1).to(x.dtype) for x in (q, k))
    o, cache = softmax_attention(q, k, v, state=state.cache, reset=step == 0, scale=scale, window=block_size)
    assert cache is not None
    return o, AttentionState(cache, seen)
