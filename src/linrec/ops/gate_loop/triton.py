"""The recurrence of matrix states on the GPU, step by step, by the kernel of `linrec.ops.matrix_triton`."""

from typing import Any

from torch import Tensor

from linrec.ops import matrix_triton
from linrec.ops.gate_loop import torch as in_torch
from linrec.ops.gate_loop.real_form import in_real_form
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
    return in_real_form(q, k, v, log_decay, phase, state, reset, run=_real)


def _real(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, phase: Tensor, *rest: Any) -> Any:
    return matrix_triton.recurrent(q, k, v, None, log_decay, *rest)
