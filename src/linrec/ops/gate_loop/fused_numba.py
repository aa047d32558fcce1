"""The fused max-headed GateLoop on the CPU: gates, recurrence and output in one pass by Numba."""

import functools
import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from linrec.ops import vmap
from linrec.ops.kernels import lanes
from linrec.ops.operators import operator

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@operator("gate_loop_numba")
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    phase: Tensor | None,
    state: Tensor,
    cut: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y (b, t, h), the last state (b, h), and those that chunks start from (b, 1 or 2, chunks, h)."""
    y = lanes.empty(q.shape, q.dtype)
    starts = _starts(q, state)
    last = _copied(state)
    with lanes.threads_for(q.numel()) as threads:
        width, size = lanes.width_of(q, threads), chunk_size(q.shape[2])
        given = *_arrays(q, k, v), *_gates(log_decay, phase, q), lanes.cut_array(cut)
        arguments = (*given, last.numpy(), starts.numpy(), y.numpy(), size, width)
        lanes.run(_kernels(), "forward", arguments, lanes.count(q, width), threads)
    return y, _joined(last), starts


@torch.library.register_fake(forward)
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    phase: Tensor | None,
    state: Tensor,
    cut: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), state.new_empty(state.shape), _starts(q, state)


@operator("gate_loop_numba_backward")
def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    phase: Tensor | None,
    state: Tensor,
    cut: Tensor | None,
    starts: Tensor,
    dy: Tensor,
    dlast: Tensor,
) -> Gradients:
    """Return the gradients of all inputs but `cut`; that of a gate which is None is empty."""
    dq, dk, dv = (lanes.empty(q.shape, q.dtype) for _ in range(3))
    ddecay, dphase = (_sums(gate, q, starts) for gate in (log_decay, phase))
    dstate = _copied(dlast)
    with lanes.threads_for(q.numel()) as threads:
        width, size = lanes.width_of(q, threads), chunk_size(q.shape[2])
        given = *_arrays(q, k, v), *_gates(log_decay, phase, q), lanes.cut_array(cut), *_arrays(starts, dy)
        arguments = (*given, *(g.numpy() for g in (dq, dk, dv, ddecay, dphase, dstate)), size, width)
        lanes.run(_kernels(), "backward", arguments, lanes.count(q, width), threads)
    gates = zip((ddecay, dphase), (log_decay, phase), strict=True)
    ddecay, dphase = (g if gate is None else g.sum_to_size(gate.shape) for g, gate in gates)
    return dq, dk, dv, ddecay, dphase, _joined(dstate)


@torch.library.register_fake(backward)
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    phase: Tensor | None,
    state: Tensor,
    cut: Tensor | None,
    starts: Tensor,
    dy: Tensor,
    dlast: Tensor,
) -> Gradients:
    ddecay, dphase = (q.new_empty((0, 0, 0) if gate is None else gate.shape) for gate in (log_decay, phase))
    return (
        q.new_empty(q.shape),
        q.new_empty(q.shape),
        q.new_empty(q.shape),
        ddecay,
        dphase,
        state.new_empty(state.shape),
    )


@functools.cache
def _kernels() -> ModuleType:
    from linrec.ops.kernels.elementwise import max_headed_numba as fused_numba_kernels

    return fused_numba_kernels


def chunk_size(channels: int) -> int:
    """Return the steps from one kept state to the next.

    What the adjoint makes for them stays in the second cache; of each input they are a piece long enough to
    come fast from memory.
    """
    return max(16, 8192 // max(channels, 1))


def _starts(q: Tensor, state: Tensor) -> Tensor:
    batch, time, channels = q.shape
    return q.new_empty(
        batch, 2 if state.is_complex() else 1, math.ceil(time / chunk_size(channels)), channels
    )


def _arrays(*tensors: Tensor) -> list[Any]:
    return [lanes.array(x) for x in tensors]


def _gates(log_decay: Tensor | None, phase: Tensor | None, q: Tensor) -> list[Any]:
    """Return the gates, a magnitude of 1 and a phase that is not there where they are None."""
    return _arrays(
        q.new_zeros(1, 1, q.shape[2]) if log_decay is None else log_decay,
        q.new_empty(0, 0, 0) if phase is None else phase,
    )


def _sums(gate: Tensor | None, q: Tensor, starts: Tensor) -> Tensor:
    if gate is None:
        return q.new_empty(0, 0, 0)
    return lanes.empty(q.shape, q.dtype) if gate.shape[1] > 1 else torch.zeros_like(starts[:, 0])


def _copied(state: Tensor) -> Tensor:
    """Return a copy (b, h, 1 or 2): the real part, and the imaginary one where there is one."""
    parts = (
        torch.view_as_real(state.resolve_conj()) if state.is_complex() else state.resolve_neg().unsqueeze(-1)
    )
    return parts.clone(memory_format=torch.contiguous_format)


def _joined(parts: Tensor) -> Tensor:
    return torch.view_as_complex(parts) if parts.shape[-1] == 2 else parts.squeeze(-1)


vmap.register(forward, backward)
