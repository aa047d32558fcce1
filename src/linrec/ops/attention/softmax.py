"""Softmax attention by torch's fused kernels, which form no matrix of scores.

The kernels are fastest without a mask, so one is made only where it says something: after resets, for several
new steps behind cached ones, and for windows. A causal window is attended to block by block, in time and
memory linear in the length.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from linrec.ops.attention.cache import AttentionCache, documents_of, newest, without_dead
from linrec.ops.core.isolation import Isolation

# shorter blocks keep too little of a GPU busy
SHORTEST_BLOCK = 128


def check_options(window: int | None, dropout: float) -> None:
    """Raise unless `window` is None or at least 1, and `dropout` in [0, 1)."""
    if window is not None and window < 1:
        raise ValueError(
            f"`window` must be at least 1, the step itself, or None for all steps; got {window}."
        )
    if not 0 <= dropout < 1:
        raise ValueError(f"`dropout` must be in [0, 1); got {dropout}.")


def of_groups(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Queries (b, t, g, dk), one for each head of `k`: of the shape that keys must have.

    Raises:
        ValueError: heads of `k` that do not divide those of `q`, or are not those of `v`.
    """
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        return q
    heads, groups = q.shape[2], k.shape[2]
    if heads != groups and (groups == 0 or heads % groups):
        raise ValueError(
            f"`k` must have as many heads as `q`, {heads}, or a number that divides it; got {groups}. "
            "Neighbouring queries share the head of a key."
        )
    if v.shape[2] != groups:
        raise ValueError(
            f"`v` must have as many heads as `k`, {groups}; got {v.shape[2]}. "
            "Keys and values are shared alike."
        )
    return q[:, :, :groups]


def repeated(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values (b, s, g, d) as (b, s, h, d), each head h / g times; a view of one head."""
    groups, heads = x.shape[2], q.shape[2]
    if groups == heads:
        return x
    # torch's kernels for groups of queries take no mask on some devices, and form all scores there
    return x[:, :, :, None].expand(-1, -1, -1, heads // groups, -1).flatten(2, 3)


def causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: AttentionCache,
    reset: Tensor | None,
    scale: float,
    window: int | None,
    dropout: float,
    attend: Callable[..., Tensor] | None = None,
) -> tuple[Tensor, AttentionCache]:
    """y_n = sum_{n-window<m<=n} softmax_m(scale q_n . k_m) v_m, over the cached steps and the new ones.

    Args:
        q: (b, t, h, dk), at least one step.
        k: (b, t, g, dk), with g heads that divide h.
        v: (b, t, g, dv).
        cache: past steps, without decays and phases.
        reset: None or (b, t) bool.
        scale: factor of the scores.
        window: steps that each step sees, its own included; None is all.
        dropout: probability that a share is dropped.
        attend: what is computed of queries and the keys that they see; None is softmax by torch's kernels.

    Returns:
        y (b, t, h, dv), and the cache of all steps, or of the last window - 1.
    """
    attend = _attend if attend is None else attend
    kept = None if window is None else window - 1
    past = newest(cache, kept)
    steps, time = past.k.shape[1], q.shape[1]
    documents = None if past.alive is None and reset is None else documents_of(past, reset, time)
    alive = None if documents is None else documents == documents[:, -1:]
    if steps:
        k, v = torch.cat([past.k, k], dim=1), torch.cat([past.v, v], dim=1)
    last = newest(AttentionCache(k, v, None, None, alive), kept)
    if documents is not None and reset is not None:
        # what earlier resets hide is zero in the cache
        last = without_dead(last)
        isolation = Isolation(documents)
        q = isolation.enter(q, begin=steps, carried=False)
        k, v = isolation.enter(k, begin=0), isolation.enter(v, begin=0)

    if window is not None and time > max(window, SHORTEST_BLOCK):
        y = _by_blocks(q, k, v, documents, scale, window, dropout, attend)
    elif documents is None and time == 1:
        y = attend(q, k, v, scale, dropout)
    elif documents is None and steps == 0 and (window is None or time <= window):
        y = attend(q, k, v, scale, dropout, is_causal=True)
    else:
        visible = _visible(q, steps, documents, window, is_causal=True)
        y = attend(q, k, v, scale, dropout, visible=visible)
    return y if reset is None else isolation.leave(y, begin=steps, window=window), last


def bidirectional(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    reset: Tensor | None,
    scale: float,
    window: int | None,
    dropout: float,
) -> Tensor:
    """y_n = sum_m softmax_m(scale q_n . k_m) v_m over the steps of n's document less than `window` away.

    Args and returns as in `causal`, without cache.
    """
    if reset is None and window is None:
        return _attend(q, k, v, scale, dropout)
    documents = None if reset is None else reset.cumsum(1)
    visible = _visible(q, 0, documents, window, is_causal=False)
    if documents is None:
        return _attend(q, k, v, scale, dropout, visible=visible)
    isolation = Isolation(documents)
    q = isolation.enter(q, begin=0, carried=False)
    k, v = isolation.enter(k, begin=0), isolation.enter(v, begin=0)
    y = _attend(q, k, v, scale, dropout, visible=visible)
    return isolation.leave(y, begin=0, window=window, causal=False)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    dropout: float,
    *,
    visible: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Queries (b, n, h, dk) attend to keys (b, m, g, dk), those `visible` to them, (b or 1, n, m)."""
    k, v = repeated(k, q), repeated(v, q)
    if len(q) == 0:
        # on CUDA the kernels return nothing at all for no rows
        return q[..., :1] + v[:, :1]
    q, k, v = (_aligned(x).transpose(1, 2) for x in (q, k, v))
    y = functional.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=None if visible is None else visible[:, None],
        dropout_p=dropout,
        is_causal=is_causal,
        scale=scale,
    )
    return y.transpose(1, 2)


def _aligned(x: Tensor) -> Tensor:
    """Return the tensor, copied where rows are not aligned to the 16 bytes that torch's kernels load."""
    if x.device.type != "cuda":
        return x
    steps = x.storage_offset(), *(() if x.is_contiguous() else x.stride()[:-1])
    if all(step * x.element_size() % 16 == 0 for step in steps):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _by_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    scale: float,
    window: int,
    dropout: float,
    attend: Callable[..., Tensor],
) -> Tensor:
    """Attend within a window, each block of queries to the keys of its own block and of the one before."""
    batch, time = q.shape[:2]
    steps = k.shape[1] - time
    block = max(window, SHORTEST_BLOCK)
    blocks = -(-time // block)
    # one block of keys more: the cached steps, behind what pads them
    ends = block - steps, blocks * block - time

    def pairs(x: Tensor) -> Tensor:
        x = x.unflatten(1, (blocks + 1, block))
        return torch.cat([x[:, :-1], x[:, 1:]], dim=2)

    queries = functional.pad(q, (0, 0, 0, 0, 0, ends[1])).unflatten(1, (blocks, block))
    keys, values = (pairs(functional.pad(x, (0, 0, 0, 0, *ends))) for x in (k, v))
    if documents is None:
        documents = torch.zeros(1, k.shape[1], dtype=torch.int64, device=k.device)
    # no step has the number of the padding, but the padding itself, which so attends to something
    documents = functional.pad(documents, ends, value=-2)
    same = documents[:, block:].unflatten(1, (blocks, block))[..., None] == pairs(documents)[:, :, None]
    ages = torch.arange(block, 2 * block, device=k.device)[:, None] - torch.arange(2 * block, device=k.device)
    visible = (same & (ages >= 0) & (ages < window)).expand(batch, -1, -1, -1)
    queries, keys, values, visible = (x.flatten(0, 1) for x in (queries, keys, values, visible))
    y = attend(queries, keys, values, scale, dropout, visible=visible)
    return y.unflatten(0, (batch, blocks)).flatten(1, 2)[:, :time]


def _visible(
    q: Tensor, steps: int, documents: Tensor | None, window: int | None, *, is_causal: bool
) -> Tensor:
    """Which of `steps` cached and t new steps each new one sees, (b or 1, t, s + t)."""
    time = q.shape[1]
    now = torch.arange(steps, steps + time, device=q.device)
    ages = now[:, None] - torch.arange(steps + time, device=q.device)
    visible = ages >= 0 if is_causal else torch.ones_like(ages, dtype=torch.bool)
    if window is not None:
        visible = visible & (ages.abs() < window)
    if documents is None:
        return visible[None]
    return visible & (documents[:, steps:, None] == documents[:, None])
