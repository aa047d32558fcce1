"""The recurrence as a plain loop over time: the oracle that the other modes are tested against."""

import torch
from torch import Tensor


def dplr_ssm_reference(
    u: Tensor,
    a: Tensor,
    p: Tensor,
    q: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor,
    reset: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """x_t = a * x_{t-1} - p Re(q^T x_{t-1}) + b u_t, y_t = Re(sum_n c_n x_tn).

    Args:
        u: (b, t, d), t at least 1, in the dtype of sums.
        a: (d, n), complex, as all but u.
        p: (d, n, r).
        q: (d, n, r).
        b: (d, n).
        c: (d, n).
        state: (b, d, n).
        reset: None or (b, t) bool.

    Returns:
        y (b, t, d) and the last state.
    """
    outputs = []
    for t in range(u.shape[1]):
        if reset is not None:
            state = torch.where(reset[:, t, None, None], 0, state)
        taken = (q * state[..., None]).sum(-2, keepdim=True).real
        state = a * state - (p * taken).sum(-1) + b * u[:, t, :, None]
        outputs.append((c * state).sum(-1).real)
    return torch.stack(outputs, 1), state
