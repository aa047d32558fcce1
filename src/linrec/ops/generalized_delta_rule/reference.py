"""The recurrence as a plain loop over time: the reference for tests of every other mode."""

import torch
from torch import Tensor

from linrec.ops.generalized_delta_rule.torch import GeneralizedDeltaRule


def generalized_delta_rule_reference(given: GeneralizedDeltaRule) -> tuple[Tensor, Tensor]:
    """S_n = (diag(a_n) - w_n r_n^T) S_{n-1} + k_n v_n^T, y_n = S_n^T q_n."""
    q, k, v, r, w, log_decay, state, reset = given
    a = torch.exp(torch.zeros_like(q) if log_decay is None else log_decay + torch.zeros_like(q))

    outputs = []
    for n in range(q.shape[1]):
        if reset is not None:
            state = torch.where(reset[:, n, None, None, None], 0, state)
        q_n, k_n, v_n, r_n, w_n = (x[:, n, :, :, None] for x in (q, k, v, r, w))
        state = (torch.diag_embed(a[:, n]) - w_n @ r_n.mT) @ state + k_n @ v_n.mT
        outputs.append((state.mT @ q_n)[..., 0])
    return torch.stack(outputs, dim=1), state
