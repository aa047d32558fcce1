"""The elementwise recurrence as a loop over time with gradients by autograd: the reference for tests."""

import torch

from linrec.ops.core.precision import accumulation
from linrec.ops.scan.torch import Scan, Values, promoted


def scan_reference(given: Scan) -> Values:
    """Compute y_t = a_t y_{t-1} + x_t step by step.

    Example:
        >>> a, x = torch.full((1, 1, 1), 0.5), torch.ones(1, 3, 1)
        >>> scan_reference(Scan(a, x, None, None, False)).y.flatten().tolist()
        [1.0, 1.5, 1.75]
    """
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
