"""The recurrence as a plain loop over time: the reference for tests of the other modes."""

import torch
from torch import Tensor

from linrec.ops.dense_ssm.torch import DenseSSM


def dense_ssm_reference(given: DenseSSM) -> tuple[Tensor, Tensor]:
    """x_t = A x_{t-1} + B u_t, y_t = C x_t."""
    u, A, B, C, x, reset = given
    x = u.new_zeros(u.shape[0], u.shape[2], B.shape[1]) if x is None else x
    ys = []
    for t in range(u.shape[1]):
        if reset is not None:
            x = torch.where(reset[:, t, None, None], 0, x)
        x = (A * x[..., None, :]).sum(-1) + B * u[:, t, :, None]
        ys.append(x if C is None else (C * x[..., None, :]).sum(-1))
    return torch.stack(ys, 1), x
