"""The recurrence as a plain loop over time: the oracle that every other mode is tested against."""

import torch
from torch import Tensor


def gate_loop_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    phase: Tensor | None,
    state: Tensor,
    reset: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """S_n = diag(a_n) S_{n-1} + k_n^T v_n, y_n = Re(q_n S_n)   (eq. 7, 8, 25).

    Args:
        q: (b, t, h, dk), real or complex.
        k: (b, t, h, dk), real or complex.
        v: (b, t, h, dv), real.
        log_decay: log |a|, None or (b or 1, t or 1, h, dk or 1).
        phase: arg a in radians, as `log_decay`.
        state: S_0, (b, h, dk, dv), complex where `phase` is given or `k` is complex.
        reset: None or (b, t) bool.

    Returns:
        y (b, t, h, dv), and S_t.
    """
    zeros = torch.zeros_like(q.real if q.is_complex() else q)
    log_decay = zeros if log_decay is None else log_decay + zeros
    a = torch.exp(log_decay)
    if phase is not None:
        a = a * torch.exp(1j * (phase + zeros))

    outputs = []
    for n in range(q.shape[1]):
        if reset is not None:
            state = torch.where(reset[:, n, None, None, None], 0, state)
        state = a[:, n, :, :, None] * state + k[:, n, :, :, None] * v[:, n, :, None, :]
        y = torch.sum(q[:, n, :, :, None] * state, dim=-2)
        outputs.append(y.real if y.is_complex() else y)
    return torch.stack(outputs, dim=1), state
