"""The recurrence as a plain loop over time: the oracle that the other modes are tested against."""

import torch
from torch import Tensor


def dense_ssm_reference(
    u: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, reset: Tensor | None
) -> tuple[Tensor, Tensor]:
    """x_t = A x_{t-1} + B u_t, y_t = C x_t.

    Args:
        u: (b, t, d), t at least 1, in the dtype of sums, as all others.
        A: (d, n, n), or (1, n, n).
        B: (d, n), or (1, n).
        C: (d, m, n), or (1, m, n).
        state: (b, d, n).
        reset: None or (b, t) bool.

    Returns:
        y (b, t, d, m) and the last state.
    """
    outputs = []
    for t in range(u.shape[1]):
        if reset is not None:
            state = torch.where(reset[:, t, None, None], 0, state)
        state = (A * state[..., None, :]).sum(-1) + B * u[:, t, :, None]
        outputs.append((C * state[..., None, :]).sum(-1))
    return torch.stack(outputs, 1), state
