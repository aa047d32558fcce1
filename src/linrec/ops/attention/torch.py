"""Attention in matrix products, with the decays and phases between steps summed segment by segment."""

import math
from functools import partial

import torch
from torch import Tensor

from linrec.ops.attention.cache import (
    FORGOTTEN,
    AttentionCache,
    alive_in,
    documents_of,
    mapped,
    without_dead,
)
from linrec.ops.core.isolation import Isolation
from linrec.ops.gate_loop import segments


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    phase: Tensor | None,
    cache: AttentionCache,
    reset: Tensor | None,
    scale: float,
) -> tuple[Tensor, AttentionCache]:
    """Softmax(M_{-inf}(Re(Qbar Kbar^T))) V   (eq. 22-23), over the cached steps and the new ones.

    Args:
        q: (b, t, h, dk), real or complex.
        k: (b, t, h, dk), real or complex.
        v: (b, t, h, dv), real.
        log_decay: None here and in the cache, or in both, as `cache.matched` returns them.
        phase: likewise; not None where a key is complex.
        cache: past steps.
        reset: None or (b, t) bool.
        scale: factor of the scores.

    Returns:
        y (b, t, h, dv), and the cache with the new steps.
    """
    last = _grown(cache, k, v, log_decay, phase)
    if reset is not None:
        steps, documents = cache.k.shape[1], documents_of(cache, reset, q.shape[1])
        last = without_dead(last._replace(alive=documents == documents[:, -1:]))
        isolation = Isolation(documents)
        q = isolation.enter(q, begin=steps, carried=False)
        k, v = isolation.enter(k, begin=steps), isolation.enter(v, begin=steps)
        if phase is not None:
            phase = isolation.enter(phase, begin=steps)
        if log_decay is not None:
            log_decay = isolation.enter(log_decay, begin=steps, decays=True)
        cache = mapped(cache, partial(isolation.enter, begin=0))

    past = mapped(cache, _heads_first)
    q, k, v = _heads_first(q), _heads_first(k), _heads_first(v)
    log_decay, phase = segments.gates(log_decay, phase, None, k)
    # a past step reaches a new one through the newest cached step: both exponents are <= 0
    queries = segments.queries(q, segments.prefix(log_decay), segments.prefix(phase))
    keys = segments.keys(past.k, past.log_decay, past.phase)
    scores = torch.cat([queries @ keys.mT, segments.matrix(q, k, log_decay, phase)], dim=-1)
    visible = _visible(alive_in(cache), reset, q.shape[-2])
    shares = torch.softmax((scale * scores).masked_fill(~visible[:, None], -math.inf), dim=-1)
    y = _heads_first(shares @ torch.cat([past.v, v], dim=-2))
    return y if reset is None else isolation.leave(y, begin=steps), last


def _grown(
    cache: AttentionCache, k: Tensor, v: Tensor, log_decay: Tensor | None, phase: Tensor | None
) -> AttentionCache:
    """The cache with the new steps, and with sums of decays and phases to the newest one."""
    log_decay, phase = segments.gates(log_decay, phase, None, _heads_first(k))
    past = mapped(cache, _heads_first)
    decays, angles = _extended(past.log_decay, log_decay), _extended(past.phase, phase)
    return AttentionCache(
        torch.cat([cache.k, k], dim=1),
        torch.cat([cache.v, v], dim=1),
        None if decays is None else _heads_first(decays.clamp(min=FORGOTTEN)),
        None if angles is None else _heads_first(segments.wrapped(angles, v.dtype)),
        torch.cat([alive_in(cache), torch.ones(k.shape[:2], dtype=torch.bool, device=k.device)], dim=1),
    )


def _extended(past: Tensor | None, new: Tensor | None) -> Tensor | None:
    """Sums to the newest step, of cached and new steps: (b, h, s, d) and (b, h, t, d) to (b, h, s + t, d)."""
    if past is None or new is None:
        return None
    return torch.cat([past + new.sum(-2, keepdim=True), segments.suffix(new)], dim=-2)


def _visible(alive: Tensor, reset: Tensor | None, time: int) -> Tensor:
    """Whether new step n may attend to each cached and new step, (b, t, s + t)."""
    visible = torch.ones(time, time, dtype=torch.bool, device=alive.device).tril().expand(len(alive), -1, -1)
    past = alive[:, None].expand(-1, time, -1)
    if reset is not None:
        segment = reset.cumsum(1)
        visible = visible & (segment[:, :, None] == segment[:, None])
        past = past & (segment == 0)[:, :, None]
    return torch.cat([past, visible], dim=-1)


def _heads_first(x: Tensor) -> Tensor:
    """(b, t, h, d) to (b, h, t, d), and back."""
    return x.transpose(1, 2)
