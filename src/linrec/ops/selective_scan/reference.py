"""The recurrence as a plain loop over time: the reference for tests of every other mode."""

import torch
from torch import Tensor

from linrec.ops.selective_scan.torch import Selective


def selective_scan_reference(given: Selective) -> tuple[Tensor, Tensor]:
    """h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t, y_t = C_t h_t + D x_t."""
    x, dt, A, B, C, D, state, reset = given
    assert state is not None
    repeats = x.shape[2] // B.shape[2]
    B, C = B.repeat_interleave(repeats, dim=2), C.repeat_interleave(repeats, dim=2)
    outputs = []
    for t in range(x.shape[1]):
        if reset is not None:
            state = torch.where(reset[:, t, None, None], 0, state)
        step, value = dt[:, t, :, None], x[:, t, :, None]
        state = torch.exp(step * A) * state + step * B[:, t] * value
        y = torch.sum(C[:, t] * state, dim=-1)
        outputs.append(y if D is None else y + D * x[:, t])
    return torch.stack(outputs, dim=1), state
