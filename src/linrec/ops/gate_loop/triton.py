"""The recurrence of matrix states on the GPU, step by step, by the kernel of `linrec.ops.matrix_triton`."""

from torch import Tensor

from linrec.ops import matrix_triton
from linrec.ops.gate_loop import torch as in_torch
from linrec.ops.gate_loop.real_form import complex_form, real_form
from linrec.ops.isolation import isolated
from linrec.ops.operators import differentiated
from linrec.ops.precision import widened


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    phase: Tensor | None,
    state: Tensor,
    reset: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Step by step, with states in registers; arguments and results as in `torch.py`, in any precision.

    Where a gradient is asked for, the loop in torch runs instead.
    """
    if not state.is_complex():
        q = q.real if q.is_complex() else q
        return matrix_triton.recurrent(q, k, v, None, log_decay, state, reset)
    q, k, v, log_decay, phase = widened(q, k, v, log_decay, phase)
    if differentiated(q, k, v, log_decay, phase, state):
        return in_torch.recurrent(q, k, v, log_decay, phase, state, reset)
    return _turning(q, k, v, log_decay, phase, state, reset)


# the frame turns on over resets
@isolated(log_decay=3)
def _turning(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    phase: Tensor | None,
    state: Tensor,
    reset: Tensor | None,
) -> tuple[Tensor, Tensor]:
    q, k, log_decay, state, angle = real_form(q, k, log_decay, phase, state)
    y, state = matrix_triton.recurrent(q, k, v, None, log_decay, state, reset)
    return y, complex_form(state, angle)
