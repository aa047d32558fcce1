"""Softmax attention as a plain loop over time, one query after the other: the oracle."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from linrec.ops.attention.cache import AttentionCache, canonical, newest
from linrec.ops.attention.reference import attention_reference, by_softmax
from linrec.ops.precision import accumulation, widened


def causal_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: AttentionCache,
    reset: Tensor | None,
    scale: float,
    window: int | None,
    dropout: float,
    weigh: Callable[[Tensor, Tensor], Tensor] = by_softmax,
) -> tuple[Tensor, AttentionCache]:
    """y_n = sum_{n-window<m<=n} softmax_m(scale q_n . k_m) v_m, from a cache that is cut after each step.

    Args and returns as in `softmax.causal`; `weigh` makes weights of scores.
    """
    kept = None if window is None else window - 1
    past = canonical(cache, k, v, accumulation(q.dtype))
    # a head of keys and values for each query, and again one for each group in the cache that is returned
    group = _group(q, k)
    past = past._replace(k=past.k.repeat_interleave(group, 2), v=past.v.repeat_interleave(group, 2))
    wide_q, wide_k, wide_v = widened(q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2))
    outputs = []
    for n in range(q.shape[1]):
        now = slice(n, n + 1)
        hides = None if reset is None else reset[:, now]
        y, past = attention_reference(
            wide_q[:, now],
            wide_k[:, now],
            wide_v[:, now],
            None,
            None,
            newest(past, kept),
            hides,
            scale,
            dropout,
            weigh,
        )
        outputs.append(y)
    past = newest(past, kept)
    last = canonical(past._replace(k=past.k[:, :, ::group], v=past.v[:, :, ::group]), k, v, k.dtype)
    if reset is None and cache.alive is None:
        last = last._replace(alive=None)
    return torch.cat(outputs, dim=1).to(v.dtype), last


def bidirectional_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    reset: Tensor | None,
    scale: float,
    window: int | None,
    dropout: float,
) -> Tensor:
    """y_n = sum_m softmax_m(scale q_n . k_m) v_m over the steps of n's document less than `window` away.

    Args and returns as in `softmax.bidirectional`.
    """
    b, time = q.shape[:2]
    group = _group(q, k)
    wide_q, wide_k, wide_v = widened(q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2))
    reach = time if window is None else window
    outputs = []
    for n in range(time):
        visible = torch.zeros(b, time, dtype=torch.bool, device=q.device)
        for m in range(max(0, n - reach + 1), min(time, n + reach)):
            first, last = min(n, m), max(n, m)
            visible[:, m] = True if reset is None else ~reset[:, first + 1 : last + 1].any(1)
        keys, values = (x.masked_fill(~visible[..., None, None], 0) for x in (wide_k, wide_v))
        scores = scale * torch.sum(wide_q[:, n : n + 1] * keys, dim=-1)
        shares = torch.softmax(scores.masked_fill(~visible[..., None], -math.inf), dim=1)
        outputs.append(torch.sum(functional.dropout(shares, dropout)[..., None] * values, dim=1))
    return torch.stack(outputs, dim=1).to(v.dtype)


def _group(q: Tensor, k: Tensor) -> int:
    """Heads of queries that share one of keys."""
    return q.shape[2] // k.shape[2] if k.shape[2] else 1
