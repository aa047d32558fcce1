"""The recurrences as plain loops over time: the references for tests of every other mode."""

import torch
from torch import Tensor

from linrec.ops.gate_loop.torch import GateLoop, Normalized


def gate_loop_reference(given: GateLoop) -> tuple[Tensor, Tensor]:
    """S_n = diag(a_n) S_{n-1} + k_n^T v_n, y_n = Re(q_n S_n)   (eq. 7, 8, 25).

    With `bonus`, y_n = Re(q_n (S_{n-1} + diag(bonus) k_n^T v_n)).
    """
    q, k, v, log_decay, phase, bonus, state, reset = given
    a = _transition(q, log_decay, phase)
    outputs = []
    for n in range(q.shape[1]):
        if reset is not None:
            state = torch.where(reset[:, n, None, None, None], 0, state)
        update = k[:, n, :, :, None] * v[:, n, :, None, :]
        before, state = state, a[:, n, :, :, None] * state + update
        seen = state if bonus is None else before + bonus[:, :, None] * update
        y = torch.sum(q[:, n, :, :, None] * seen, dim=-2)
        outputs.append(y.real if y.is_complex() else y)
    return torch.stack(outputs, dim=1), state


def normalized_gate_loop_reference(given: Normalized) -> tuple[Tensor, Tensor]:
    """S_n as above, z_n = diag(a_n) z_{n-1} + k_n, y_n = Re(q_n S_n) / denominator(Re(q_n z_n)).

    z_n is the last column of the state, since it is the state for values of 1.
    """
    q, k, v, log_decay, phase, bonus, state, reset, floor, signed = given
    others, ones = (log_decay, phase, bonus), v.new_ones(*v.shape[:-1], 1)
    y, matrix = gate_loop_reference(GateLoop(q, k, v, *others, state[..., :-1], reset))
    total, sums = gate_loop_reference(GateLoop(q, k, ones, *others, state[..., -1:], reset))
    least = floor[..., None] if isinstance(floor, Tensor) else floor
    size = torch.where(total.abs() > least, total.abs(), least)
    return y / torch.where((total < 0) & signed, -size, size), torch.cat([matrix, sums], dim=-1)


def _transition(q: Tensor, log_decay: Tensor | None, phase: Tensor | None) -> Tensor:
    """Return a = exp(log_decay + i phase) in the shape of q."""
    zeros = torch.zeros_like(q.real if q.is_complex() else q)
    log_decay = zeros if log_decay is None else log_decay + zeros
    a = torch.exp(log_decay)
    return a if phase is None else a * torch.exp(1j * (phase + zeros))
