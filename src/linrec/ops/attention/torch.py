"""Attention in matrix products, with the decays and phases between steps summed segment by segment."""

import math

import torch
from torch import Tensor

from linrec.ops.attention.cache import FORGOTTEN, AttentionCache, alive_in
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
    past = _heads_first_in(cache)
    q, k, v = _heads_first(q), _heads_first(k), _heads_first(v)
    log_decay, phase = segments.gates(log_decay, phase, None, k)

    # a past step reaches a new one through the newest cached step: both exponents are <= 0
    queries = segments.queries(q, segments.prefix(log_decay), segments.prefix(phase))
    keys = segments.keys(past.k, past.log_decay, past.phase)
    scores = torch.cat([queries @ keys.mT, segments.matrix(q, k, log_decay, phase)], dim=-1)
    visible = _visible(alive_in(cache), reset, q.shape[-2])
    shares = torch.softmax((scale * scores).masked_fill(~visible[:, None], -math.inf), dim=-1)
    values = torch.cat([past.v, v], dim=-2)

    last = AttentionCache(
        torch.cat([past.k, k], dim=-2),
        values,
        _extended(past.log_decay, log_decay),
        _extended(past.phase, phase),
        # a view would keep all pairs of steps as long as the cache
        visible[:, -1].clone(),
    )
    if last.log_decay is not None:
        last = last._replace(log_decay=last.log_decay.clamp(min=FORGOTTEN))
    if last.phase is not None:
        last = last._replace(phase=segments.wrapped(last.phase, values.dtype))
    return _heads_first(shares @ values), _heads_first_in(last)


def _visible(alive: Tensor, reset: Tensor | None, time: int) -> Tensor:
    """Whether new step n may attend to each cached and new step, (b, t, s + t)."""
    visible = torch.ones(time, time, dtype=torch.bool, device=alive.device).tril().expand(len(alive), -1, -1)
    past = alive[:, None].expand(-1, time, -1)
    if reset is not None:
        segment = reset.cumsum(1)
        visible = visible & (segment[:, :, None] == segment[:, None])
        past = past & (segment == 0)[:, :, None]
    return torch.cat([past, visible], dim=-1)


def _extended(past: Tensor | None, new: Tensor | None) -> Tensor | None:
    """Sums to the newest step, of cached and new steps: (b, h, s, d) and (b, h, t, d) to (b, h, s + t, d)."""
    if past is None or new is None:
        return None
    return torch.cat([past + new.sum(-2, keepdim=True), segments.suffix(new)], dim=-2)


def _heads_first(x: segments.MaybeTensor) -> segments.MaybeTensor:
    """(b, t, h, d) to (b, h, t, d), and back."""
    return None if x is None else x.transpose(1, 2)


def _heads_first_in(cache: AttentionCache) -> AttentionCache:
    return AttentionCache(
        _heads_first(cache.k),
        _heads_first(cache.v),
        _heads_first(cache.log_decay),
        _heads_first(cache.phase),
        cache.alive,
    )
