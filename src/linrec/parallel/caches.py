"""Attention: every rank gets the keys and values of the segments before, as a cache.

With a window of w steps, a rank sends its last w - 1 steps; else all of them.
"""

import torch
from torch import Tensor
from torch.nn import functional

from linrec.ops.attention.cache import AttentionCache, newest
from linrec.ops.core.call import Call, Result
from linrec.ops.core.isolation import beside, documents
from linrec.parallel.meeting import meet
from linrec.parallel.ranks import Ranks

__all__ = ["attention"]


def attention(ranks: Ranks, call: Call) -> Result:
    """Run `softmax_attention` or `laplace_attention` on this rank's queries.

    The cache at the end is that of the whole sequence, on every rank.
    """
    given = call.inputs
    cache: AttentionCache = given.state
    k, v, time = given.k, given.v, given.k.shape[1]
    start = k.new_empty(k.shape[0], k.shape[2], k.shape[3], v.shape[3])
    tensors = [*given[:3], cache.k, cache.v, given.slopes]
    reset = given.reset
    meeting = meet(ranks, call.operator.name, start, time, tensors=tensors, state=cache, reset=reset)

    most = max(meeting.steps) if given.window is None else given.window - 1
    sent = [min(steps, most) for steps in meeting.steps]
    own = [x[:, time - sent[ranks.rank] :] for x in (k, v)]
    alive = k.new_ones(own[0].shape[:2], dtype=torch.bool)
    if reset is not None:
        document = documents(reset)
        alive = (document == document[:, -1:])[:, time - sent[ranks.rank] :]
        # a weight of zero would let NaN pass
        own = [x.masked_fill(~beside(alive, x), 0) for x in own]
    missing = max(sent) - sent[ranks.rank]
    padded = [functional.pad(x, (0, 0, 0, 0, 0, missing)) for x in own]
    gathered = meeting.gather(tensors, *padded, functional.pad(alive, (0, missing)), meeting.cuts(reset, k))

    past = final = cache
    if meeting.has_reset and cache.alive is None:
        past = final = cache._replace(alive=k.new_ones(cache.k.shape[:2], dtype=torch.bool))
    for rank, n in enumerate(sent):
        if rank == ranks.rank:
            past = final
        *steps, cut = gathered[rank]
        final = newest(_joined(final, [x[:, :n] for x in steps], cut), given.window)
    y, _ = call.operator.run(given._replace(state=past), call.backend)
    return meeting.tied(y, gathered, cache.k, cache.v), final


def _joined(cache: AttentionCache, steps: list[Tensor], cut: Tensor) -> AttentionCache:
    """Return the cache after the keys, values and flags of a segment; `cut` says where it has a reset."""
    k, v, alive = steps
    kept, flags = [cache.k, cache.v], cache.alive
    if flags is not None:
        flags = flags & (cut[:, None] == 0)
        kept = [x.masked_fill(~beside(flags, x), 0) for x in kept]
        flags = torch.cat([flags, alive != 0], 1)
    k, v = (torch.cat([x, more], 1) for x, more in zip(kept, (k, v), strict=True))
    return AttentionCache(k, v, None, None, flags)
