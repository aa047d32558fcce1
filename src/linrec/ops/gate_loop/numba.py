"""The recurrences of `gate_loop` and `delta_rule` on the CPU, step by step by Numba.

A state stays in the cache while time runs over it, so that a step costs what its arithmetic does. Of the
states, one per chunk of steps is kept where a gradient is asked for, from which the adjoint makes the others
again.
"""

import math
from typing import Any

import torch
from torch import Tensor

from linrec.ops.core.kernel import Memory, by_autograd, kernel_op, like
from linrec.ops.core.precision import widened
from linrec.ops.gate_loop.chunkwise import chunkwise
from linrec.ops.gate_loop.inputs import GateLoop, Matrix, Values
from linrec.ops.gate_loop.real_form import in_real_form
from linrec.ops.kernels import Kernels, lanes

KERNELS = Kernels("matrix.numba")
# entries of a state that take as long as one element of the operators that `lanes` was measured with
_ENTRIES = 8


def _memory(given: Matrix, keep: bool) -> Any:
    q, v = given.q, given.v
    batch, time, heads, dk = q.shape
    chunks = math.ceil(time / chunk_size(q, v)) if keep else 0
    return like(v), like(given.state), Memory((batch, heads, chunks, dk, v.shape[-1]), q.dtype)


def _forward(out: Values, given: Matrix) -> None:
    q, v = given.q, given.v
    out.last.copy_(given.state)
    with lanes.threads_for(q.numel() * v.shape[-1] // _ENTRIES) as threads:
        width = width_of(v, threads)
        written = out.last.numpy(), out.kept.numpy(), out.y.numpy()
        arguments = (*_arrays(given), *written, chunk_size(q, v), width)
        lanes.run(KERNELS, "forward", arguments, _count(v, width), threads)


def _adjoint(out: Any, given: Matrix, kept: Values, d: Values) -> None:
    q, v, starts = given.q, given.v, kept.kept
    out.state.copy_(d.last)
    with lanes.threads_for(q.numel() * v.shape[-1] // _ENTRIES) as threads:
        width = width_of(v, threads)
        blocks = _blocks(v, width)
        # each block of value channels has sums of its own; the only one has the gradients themselves
        sums = [
            starts.new_empty((0,) * (starts.dim() - 1))
            if x is None
            else x[None]
            if blocks == 1
            else lanes.empty((blocks, *x.shape), x.dtype)
            for x in (out.q, out.k, out.beta)
        ]
        ddecay, dphase = (_sums(gate, starts, blocks) for gate in (given.log_decay, given.phase))
        dq, dk, dbeta = sums
        gradients = dq, dk, out.v, dbeta, ddecay, dphase, out.state
        arrays = *_arrays(given), lanes.array(starts), lanes.array(d.y), *(g.numpy() for g in gradients)
        lanes.run(KERNELS, "backward", (*arrays, chunk_size(q, v), width), _count(v, width), threads)
    for x, partial in zip((out.q, out.k, out.beta), sums, strict=True):
        if x is not None and blocks > 1:
            torch.sum(partial, 0, out=x)
    for gate, partial in ((out.log_decay, ddecay), (out.phase, dphase)):
        if gate is not None:
            gate.copy_(partial.sum(0).sum_to_size(gate.shape))


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


def _arrays(given: Matrix) -> list[Any]:
    """Return what forward and adjoint read: a decay of 1 where there is none, and an empty `beta`."""
    q, k, v, beta, log_decay, _, _, cut = given
    strengths = lanes.nothing(3, q.dtype) if beta is None else lanes.array(beta)
    a = q.new_ones(1, 1, q.shape[2], 1) if log_decay is None else log_decay.exp()
    return [*map(lanes.array, (q, k, v)), strengths, lanes.array(a), lanes.cut_array(cut)]


def _sums(gate: Tensor | None, starts: Tensor, blocks: int) -> Tensor:
    """Return zeros that the kernel adds a gate's gradient to: one per chunk where it is constant in time."""
    if gate is None:
        return starts.new_empty(0, 0, 0, 0, 0)
    batch, _, chunks = starts.shape[:3]
    _, time, heads, channels = gate.shape
    return starts.new_zeros(blocks, batch, time if time > 1 else chunks, heads, channels)


def twin(given: Matrix) -> tuple[Tensor, Tensor]:
    """Return y and the last state by torch operations, which gradients of gradients go through."""
    # the delta rule imports this module
    from linrec.ops.delta_rule.torch import DeltaRule
    from linrec.ops.delta_rule.torch import chunkwise as delta_rule

    q, k, v, beta, log_decay, phase, state, cut = widened(given)
    if beta is not None:
        y, last = delta_rule(DeltaRule(q, k, v, beta, log_decay, state, cut))
    elif phase is None:
        y, last = chunkwise(GateLoop(q, k, v, log_decay, None, None, state, cut))
    else:
        # in the frame that turns, phases are zero, whatever their derivatives are
        q, k = torch.complex(*q.chunk(2, dim=-1)).conj(), torch.complex(*k.chunk(2, dim=-1))
        if log_decay is not None and log_decay.shape[-1] > 1:
            log_decay = log_decay.chunk(2, dim=-1)[0]
        start = torch.complex(*state.chunk(2, dim=-2))
        y, last = chunkwise(GateLoop(q, k, v, log_decay, phase - phase.detach(), None, start, cut))
        last = torch.cat([last.real, last.imag], dim=-2)
    return y.to(given.v.dtype), last


matrix_recurrence = kernel_op(
    "matrix_recurrence_numba",
    Matrix,
    Values,
    _memory,
    _forward,
    _adjoint,
    again=by_autograd(twin),
    batch="q",
    kept=("kept",),
)


def run(given: Matrix) -> tuple[Tensor, Tensor]:
    """Return y and the last state."""
    y, last, _ = matrix_recurrence(given)
    return y, last


recurrent = in_real_form(run)
