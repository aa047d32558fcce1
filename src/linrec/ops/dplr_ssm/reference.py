"""The recurrence as a plain loop over time: the reference for tests of the other modes."""

import torch
from torch import Tensor

from linrec.ops.dplr_ssm.torch import DPLRSSM


def dplr_ssm_reference(given: DPLRSSM) -> tuple[Tensor, Tensor]:
    """x_t = a * x_{t-1} - p Re(q^T x_{t-1}) + b u_t, y_t = Re(sum_n c_n x_tn)."""
    u, a, p, q, b, c, x, reset = given
    x = a.new_zeros(u.shape[0], *a.shape) if x is None else x
    ys = []
    for t in range(u.shape[1]):
        if reset is not None:
            x = torch.where(reset[:, t, None, None], 0, x)
        taken = (q * x[..., None]).sum(-2, keepdim=True).real
        x = a * x - (p * taken).sum(-1) + b * u[:, t, :, None]
        ys.append((c * x).sum(-1).real)
    return torch.stack(ys, 1), x
