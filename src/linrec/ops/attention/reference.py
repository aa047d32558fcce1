"""Attention as a plain loop over time, each query against all keys so far: the oracle."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from linrec.ops.attention.cache import FORGOTTEN, AttentionCache, alive_in, without_dead


def by_softmax(scores: Tensor, alive: Tensor) -> Tensor:
    """Shares of the steps that are alive, (b, s, h), and zeros of the others."""
    return torch.softmax(scores.masked_fill(~alive, -math.inf), dim=1)


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    phase: Tensor | None,
    cache: AttentionCache,
    reset: Tensor | None,
    scale: float,
    dropout: float = 0.0,
    weigh: Callable[[Tensor, Tensor], Tensor] = by_softmax,
) -> tuple[Tensor, AttentionCache]:
    """y_n = sum_{m<=n} softmax_m(scale Re(q_n . k_m prod_{j=m+1..n} a_j)) v_m   (eq. 22-23).

    Args and returns as in `torch.attention`; `dropout` is the probability that a share is dropped, and
    `weigh` makes weights of scores.
    """
    keys, values, decays, angles, _ = cache
    alive = alive_in(cache)
    outputs = []
    for n in range(q.shape[1]):
        if reset is not None:
            alive = alive & ~reset[:, n : n + 1]
            cache = without_dead(AttentionCache(keys, values, decays, angles, alive))
            keys, values, decays, angles, _ = cache
        keys, values = _append(keys, k[:, n]), _append(values, v[:, n])
        alive = _append(alive, alive.new_ones(len(alive)))
        weights = torch.ones_like(keys)
        if log_decay is not None and decays is not None:
            decays = _append(decays + log_decay[:, n : n + 1], torch.zeros_like(log_decay[:, n]))
            weights = weights * torch.exp(decays)
        if phase is not None and angles is not None:
            angles = _append(angles + phase[:, n : n + 1], torch.zeros_like(phase[:, n]))
            weights = weights * torch.exp(1j * angles)
        products = torch.sum(q[:, n : n + 1] * keys * weights, dim=-1)
        scores = scale * (products.real if products.is_complex() else products)
        shares = functional.dropout(weigh(scores, alive[..., None]), dropout)
        outputs.append(torch.sum(shares[..., None] * values, dim=1))
    decays = None if decays is None else decays.clamp(min=FORGOTTEN)
    angles = None if angles is None else torch.remainder(angles, 2 * math.pi)
    last = AttentionCache(keys, values, decays, angles, alive)
    return torch.stack(outputs, dim=1), last if reset is None else without_dead(last)


def _append(steps: Tensor, step: Tensor) -> Tensor:
    return torch.cat([steps, step[:, None]], dim=1)
