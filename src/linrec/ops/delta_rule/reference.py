"""The recurrence as a plain loop over time: the reference for tests of every other mode."""

import torch
from torch import Tensor

from linrec.ops.delta_rule.torch import DeltaRule


def delta_rule_reference(given: DeltaRule) -> tuple[Tensor, Tensor]:
    """S_n = (I - beta_n k_n k_n^T) diag(a_n) S_{n-1} + beta_n k_n v_n^T, y_n = S_n^T q_n."""
    q, k, v, beta, log_decay, state, reset = given
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
