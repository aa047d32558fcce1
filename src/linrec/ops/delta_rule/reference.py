"""The recurrence as a plain loop over time: the oracle that every other mode is tested against."""

import torch
from torch import Tensor


def delta_rule_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    reset: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """S_n = (I - beta_n k_n k_n^T) diag(a_n) S_{n-1} + beta_n k_n v_n^T, y_n = S_n^T q_n.

    Args:
        q: (b, t, h, dk).
        k: (b, t, h, dk).
        v: (b, t, h, dv).
        beta: (b, t, h).
        log_decay: log a, None or (b or 1, t or 1, h, dk or 1).
        state: S_0, (b, h, dk, dv).
        reset: None or (b, t) bool.

    Returns:
        y (b, t, h, dv), and S_t.
    """
    a = torch.exp(torch.zeros_like(q) if log_decay is None else log_decay + torch.zeros_like(q))
    identity = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)

    outputs = []
    for n in range(q.shape[1]):
        if reset is not None:
            state = torch.where(reset[:, n, None, None, None], 0, state)
        k_n, beta_n = k[:, n, :, :, None], beta[:, n, :, None, None]
        v_n, q_n = v[:, n, :, :, None], q[:, n, :, :, None]
        state = (identity - beta_n * k_n @ k_n.mT) @ (a[:, n, :, :, None] * state) + beta_n * k_n @ v_n.mT
        outputs.append((state.mT @ q_n)[..., 0])
    return torch.stack(outputs, dim=1), state
