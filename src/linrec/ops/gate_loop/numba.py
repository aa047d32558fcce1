"""The recurrence of matrix states on the CPU, by the kernels of `linrec.ops.matrix_numba`."""

from typing import Any

from torch import Tensor

from linrec.ops import matrix_numba
from linrec.ops.gate_loop.real_form import in_real_form
from linrec.ops.gate_loop.torch import elementwise


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    phase: Tensor | None,
    state: Tensor,
    reset: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Step by step, with states that stay in the caches of CPU threads.

    Arguments and results as in `torch.py`. Heads of one channel fill vectors as channels of a scan.
    """
    if q.shape[-1] == v.shape[-1] == 1:
        return elementwise(q, k, v, log_decay, phase, state, reset, mode="recurrent", backend="numba")
    if not state.is_complex():
        q = q.real if q.is_complex() else q
        return matrix_numba.recurrent(q, k, v, None, log_decay, state, reset)
    return in_real_form(q, k, v, log_decay, phase, state, reset, run=_real)


def _real(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, phase: Tensor, *rest: Any) -> Any:
    return matrix_numba.recurrent(q, k, v, None, log_decay, *rest, phase=phase)
