"""The recurrence as a plain loop over time: the oracle that the other modes are tested against."""

import torch
from torch import Tensor


def diagonal_ssm_reference(
    u: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor | None, reset: Tensor | None
) -> tuple[Tensor, Tensor]:
    """x_t = a * x_{t-1} + b u_t, y_t = Re(sum_n c_n x_tn).

    Args:
        u: (b, t, d), t at least 1.
        a: (d, n) or (1, n), in the dtype of sums, as b, c and the state.
        b: as a.
        c: (d, n).
        state: (b, d, n), or None.
        reset: None or (b, t) bool.

    Returns:
        y (b, t, d) and the last state.
    """
    u = u.to(a.dtype)
    if state is None:
        state = u.new_zeros(len(u), *c.shape)
    outputs = []
    for n in range(u.shape[1]):
        if reset is not None:
            state = torch.where(reset[:, n, None, None], 0, state)
        state = a * state + b * u[:, n, :, None]
        y = (c * state).sum(-1)
        outputs.append(y.real if y.is_complex() else y)
    return torch.stack(outputs, 1), state
