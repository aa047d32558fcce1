"""Attention as a plain loop over time, with the visible keys of each query: the reference."""

import math

import torch
from torch import Tensor
from torch.nn import functional

from linrec.ops.attention.cache import Attention, Result, documents_of, grown, mapped
from linrec.ops.attention.torch import WEIGHERS
from linrec.ops.core.precision import wide


def loop(given: Attention) -> Result:
    """y_n = sum_{m<=n} softmax_m(scale Re(q_n . k_m prod_{j=m+1..n} a_j)) v_m   (eq. 22-23)."""
    q, k, v, log_decay, phase, state, reset, scale, window, causal, dropout, function, slopes = given
    past_k, past_v, decays, angles, *_ = mapped(state, wide)
    steps, time, group = past_k.shape[1], q.shape[1], q.shape[2] // max(1, k.shape[2])
    k, v = torch.cat([past_k, k], dim=1), torch.cat([past_v, v], dim=1)
    every_k, every_v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    found = documents_of(state, reset, time)
    documents = k.new_ones(k.shape[:2]) if found is None else found
    place = torch.arange(steps + time, device=q.device)
    outputs = []
    for t in range(time):
        n = steps + t
        reached = slice(n + 1 if causal else steps + time)
        visible = documents[:, reached] == documents[:, n, None]
        if window is not None:
            visible = visible & ((place[reached] - n).abs() < window)
        hidden = ~visible[..., None, None]
        keys, values = (x[:, reached].masked_fill(hidden, 0) for x in (every_k, every_v))
        if log_decay is not None and decays is not None:
            decays = _onwards(decays, log_decay[:, t])
            keys = keys * torch.exp(decays.masked_fill(hidden, 0))
        if phase is not None and angles is not None:
            angles = _onwards(angles, phase[:, t])
            keys = keys * torch.exp(1j * angles.masked_fill(hidden, 0))
        products = torch.sum(q[:, t, None] * keys, dim=-1)
        scores, seen = scale * (products.real if products.is_complex() else products), visible[..., None]
        if slopes is not None:
            scores = scores - slopes * (place[reached] - n).abs()[:, None]
        if function in WEIGHERS:
            weights = WEIGHERS[function](scores) * seen
        else:
            weights = torch.softmax(scores.masked_fill(~seen, -math.inf), dim=1)
        outputs.append(torch.sum(functional.dropout(weights, dropout)[..., None] * values, dim=1))
    return torch.stack(outputs, dim=1), grown(given, k, v, (decays, angles), found)


def _onwards(sums: Tensor, gate: Tensor) -> Tensor:
    """Return sums of gates up to the next step, with a zero appended for the next step itself."""
    return torch.cat([sums + gate[:, None], torch.zeros_like(gate)[:, None]], dim=1)
