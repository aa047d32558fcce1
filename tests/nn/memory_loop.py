"""The mLSTM cell as its paper prints it, without stabiliser, one row, head and step after the other."""

import math

import torch
from torch import Tensor


def mlstm_loop(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """C, n and h for q, k (b, t, h, dk), v (b, t, h, dv) and gates (b, t, h): h, and the last C and n."""
    batch, time, heads, d_key = q.shape
    outputs, matrices, sums = [], [], []
    for b in range(batch):
        for h in range(heads):
            C, n, steps = torch.zeros(v.shape[-1], d_key).to(q), torch.zeros(d_key).to(q), []
            for t in range(time):
                key = k[b, t, h] / math.sqrt(d_key)
                C = f[b, t, h] * C + i[b, t, h] * torch.outer(v[b, t, h], key)
                n = f[b, t, h] * n + i[b, t, h] * key
                steps.append(C @ q[b, t, h] / max(abs(n @ q[b, t, h]), torch.ones(()).to(q)))
            outputs.append(torch.stack(steps))
            matrices.append(C)
            sums.append(n)
    y = torch.stack(outputs).unflatten(0, (batch, heads)).transpose(1, 2)
    return (
        y,
        torch.stack(matrices).unflatten(0, (batch, heads)),
        torch.stack(sums).unflatten(0, (batch, heads)),
    )
