"""Matrix states on the CPU: the recurrences of `gate_loop` and `delta_rule`, step by step by Numba.

A state stays in the cache while time runs over it, so that a step costs what its arithmetic does. Of the
states, one per chunk of steps is kept where a gradient is asked for, from which the adjoint makes the others
again.
"""

import functools
import inspect
import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from linrec.ops import matrix_torch, vmap
from linrec.ops.kernels import lanes
from linrec.ops.operators import differentiated, operator

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]

# entries of a state that take as long as one element of the operators that `lanes` was measured with
_ENTRIES = 8


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    state: Tensor,
    reset: Tensor | None,
    *,
    phase: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run `delta_rule`, or a real `gate_loop` where `beta` is None.

    Args:
        q: (b, t, h, dk), float32 or float64, as all of them.
        k: (b, t, h, dk).
        v: (b, t, h, dv).
        beta: None or (b, t, h).
        log_decay: log a, None or (b or 1, t or 1, h, dk or 1).
        state: S_0, (b, h, dk, dv).
        reset: None or (b, t) bool.
        phase: None, or phases (b or 1, t or 1, h, dk / 2 or 1) by which the frame of `real_form` turns. They
            get their gradient here, and have no part in the values.

    Returns:
        y (b, t, h, dv), and S_t.
    """
    if differentiated(q, k, v, beta, log_decay, phase, state):
        y, last, _ = MatrixRecurrence.apply(q, k, v, beta, log_decay, phase, state, reset)
    else:
        y, last, _ = forward(q, k, v, beta, log_decay, state, reset, keep=False)
    return y, last


class MatrixRecurrence(torch.autograd.Function):
    """y, last, starts = MatrixRecurrence.apply(q, k, v, beta, log_decay, phase, state, cut).

    The states `starts`, which chunks of steps start from, are kept for the adjoint and have no gradient of
    their own.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor | None,
        log_decay: Tensor | None,
        phase: Tensor | None,
        state: Tensor,
        cut: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the kernel."""
        return forward(q, k, v, beta, log_decay, state, cut, keep=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        """Keep the inputs and a few states."""
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(*inputs, output[2])

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dlast: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Run the adjoint kernel, or torch operations where the gradient is to be differentiated again."""
        *inputs, starts = ctx.saved_tensors
        needed = ctx.needs_input_grad[:7]
        if torch.is_grad_enabled():
            return (*matrix_torch.gradients(needed, inputs, dy, dlast), None)
        gradients = backward(*inputs, starts, dy, dlast)
        return (*(g if need else None for g, need in zip(gradients, needed, strict=True)), None)


# autograd asks for it at every call, and making it takes longer than a small recurrence
MatrixRecurrence.forward.__signature__ = inspect.signature(MatrixRecurrence.forward)  # type: ignore[attr-defined]


@operator("matrix_recurrence_numba")
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    state: Tensor,
    cut: Tensor | None,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y (b, t, h, dv), the last state, and those that chunks start from (b, h, chunks, dk, dv).

    Without `keep` there are no chunks.
    """
    y, starts = lanes.empty(v.shape, v.dtype), _starts(q, v, keep=keep)
    last = state.clone(memory_format=torch.contiguous_format)
    with lanes.threads_for(q.numel() * v.shape[-1] // _ENTRIES) as threads:
        width = width_of(v, threads)
        written = last.numpy(), starts.numpy(), y.numpy()
        arguments = (*_given(q, k, v, beta, log_decay, cut), *written, chunk_size(q, v), width)
        lanes.run(_kernels(), "forward", arguments, _count(v, width), threads)
    return y, last, starts


@torch.library.register_fake(forward)
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    state: Tensor,
    cut: Tensor | None,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return v.new_empty(v.shape), state.new_empty(state.shape), _starts(q, v, keep=keep)


@operator("matrix_recurrence_numba_backward")
def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    phase: Tensor | None,
    state: Tensor,
    cut: Tensor | None,
    starts: Tensor,
    dy: Tensor,
    dlast: Tensor,
) -> Gradients:
    """Return the gradients of all inputs but `cut`; that of `beta` or of a gate which is None is empty."""
    dv, dstate = lanes.empty(v.shape, v.dtype), dlast.clone(memory_format=torch.contiguous_format)
    with lanes.threads_for(q.numel() * v.shape[-1] // _ENTRIES) as threads:
        width = width_of(v, threads)
        blocks = _blocks(v, width)
        dq, dk = (lanes.empty((blocks, *q.shape), q.dtype) for _ in range(2))
        dbeta = q.new_empty(0, 0, 0, 0) if beta is None else lanes.empty((blocks, *beta.shape), q.dtype)
        ddecay, dphase = (_sums(gate, starts, blocks) for gate in (log_decay, phase))
        gradients = dq, dk, dv, dbeta, ddecay, dphase, dstate
        given = *_given(q, k, v, beta, log_decay, cut), lanes.array(starts), lanes.array(dy)
        arguments = (*given, *(g.numpy() for g in gradients), chunk_size(q, v), width)
        lanes.run(_kernels(), "backward", arguments, _count(v, width), threads)
    sums = (g[0] if len(g) == 1 else g.sum(0) for g in (dq, dk, dbeta, ddecay, dphase))
    dq, dk, dbeta, ddecay, dphase = sums
    gates = zip((ddecay, dphase), (log_decay, phase), strict=True)
    ddecay, dphase = (g if gate is None else g.sum_to_size(gate.shape) for g, gate in gates)
    return dq, dk, dv, dbeta, ddecay, dphase, dstate


@torch.library.register_fake(backward)
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    phase: Tensor | None,
    state: Tensor,
    cut: Tensor | None,
    starts: Tensor,
    dy: Tensor,
    dlast: Tensor,
) -> Gradients:
    gates = log_decay, phase
    ddecay, dphase = (q.new_empty((0, 0, 0, 0) if gate is None else gate.shape) for gate in gates)
    return (
        q.new_empty(q.shape),
        q.new_empty(q.shape),
        v.new_empty(v.shape),
        q.new_empty((0, 0, 0) if beta is None else beta.shape),
        ddecay,
        dphase,
        state.new_empty(state.shape),
    )


@functools.cache
def _kernels() -> ModuleType:
    from linrec.ops.kernels.matrix import numba as matrix_numba_kernels

    return matrix_numba_kernels


def chunk_size(q: Tensor, v: Tensor) -> int:
    """Return the steps from one kept state to the next.

    The states that the adjoint makes for them stay in the second cache, and what is kept of large states is
    not much more than queries, keys and values.
    """
    return min(64, max(16, (1 << 17) // max(q.shape[-1] * v.shape[-1], 1)))


def width_of(v: Tensor, threads: int) -> int:
    """Return how many value channels a lane has: all, if batch and heads keep all threads busy."""
    batch, _, heads, values = v.shape
    rows = batch * heads
    if rows >= 4 * threads:
        return max(values, 1)
    blocks = threads // math.gcd(rows, threads)
    # whole cache lines: two threads that write to the same one wait for each other
    return 16 * max(math.ceil(values / blocks / 16), 1)


def _blocks(v: Tensor, width: int) -> int:
    return math.ceil(v.shape[-1] / width)


def _count(v: Tensor, width: int) -> int:
    return v.shape[0] * v.shape[2] * _blocks(v, width)


def _starts(q: Tensor, v: Tensor, *, keep: bool) -> Tensor:
    batch, time, heads, channels = q.shape
    if not keep:
        return q.new_empty(batch, 0, 0, 0, 0)
    return q.new_empty(batch, heads, math.ceil(time / chunk_size(q, v)), channels, v.shape[-1])


def _given(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, log_decay: Tensor | None, cut: Tensor | None
) -> list[Any]:
    """Return what forward and backward read: a decay of 1 where there is none, and an empty `beta`."""
    beta = q.new_empty(0, 0, 0) if beta is None else beta
    a = q.new_ones(1, 1, q.shape[2], 1) if log_decay is None else log_decay.exp()
    return [*(lanes.array(x) for x in (q, k, v, beta, a)), lanes.cut_array(cut)]


def _sums(gate: Tensor | None, starts: Tensor, blocks: int) -> Tensor:
    """Return zeros that the kernel adds a gate's gradient to: one per chunk where it is constant in time."""
    if gate is None:
        return starts.new_empty(0, 0, 0, 0, 0)
    batch, _, chunks = starts.shape[:3]
    _, time, heads, channels = gate.shape
    return starts.new_zeros(blocks, batch, time if time > 1 else chunks, heads, channels)


vmap.register(forward, backward)
