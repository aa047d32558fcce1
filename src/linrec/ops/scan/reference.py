"""The elementwise recurrence as a loop over time with gradients by autograd: the reference for tests."""

import torch

from linrec.ops.core.precision import accumulation
from linrec.ops.scan.torch import Scan, Values, promoted


def scan_reference(given: Scan) -> Values:
    """Compute y_t = a_t y_{t-1} + x_t step by step."""
    a, x, state, cut, reverse = given
    dtype = promoted(a.dtype, x.dtype)
    y = torch.zeros_like(x[:, 0], dtype=accumulation(dtype)) if state is None else state
    a, ys = a.expand(x.shape), [y] * x.shape[1]
    for t in reversed(range(len(ys))) if reverse else range(len(ys)):
        if cut is not None:
            y = torch.where(cut[:, t, None], 0, y)
        y = a[:, t] * y + x[:, t]
        ys[t] = y
    return Values(torch.stack(ys, dim=1).to(dtype), y)
