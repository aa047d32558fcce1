"""The elementwise recurrence as a loop over time, differentiated by autograd alone: the oracle."""

import torch
from torch import Tensor

from linrec.ops.scan.dtypes import promoted


def scan_reference(
    a: Tensor, x: Tensor, state: Tensor, reset: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor]:
    """y_t = a_t y_{t-1} + x_t, one step after the other.

    Args:
        a: (b, t, c), real or complex.
        x: (b, t, c), real or complex.
        state: (b, c), the value before the first step, in the accumulation dtype.
        reset: (b, t) bool or None; true at t cuts the link between t-1 and t.
        reverse: run from the last step to the first.

    Returns:
        y (b, t, c) in the dtype that `promoted` says, and the last value (b, c) in state's dtype.

    Example:
        >>> a, x = torch.full((1, 3, 1), 0.5), torch.ones(1, 3, 1)
        >>> scan_reference(a, x, torch.zeros(1, 1), None, False)[0].flatten().tolist()
        [1.0, 1.5, 1.75]
    """
    time = x.shape[1]
    ys = [state] * time
    y = state
    for t in reversed(range(time)) if reverse else range(time):
        # the link into step t comes from t-1, or from t+1 when time runs backwards
        link = t + 1 if reverse else t
        if reset is not None and link < time:
            y = torch.where(reset[:, link, None], 0, y)
        y = a[:, t] * y + x[:, t]
        ys[t] = y
    return torch.stack(ys, dim=1).to(promoted(a.dtype, x.dtype)), y
