"""Matrix states on GPUs: chunks on tensor cores, and step by step for decoding."""

from typing import Any

import torch
from torch import Tensor

from linrec.ops.core.isolation import isolated
from linrec.ops.core.kernel import NOTHING, Memory, by_autograd, forward_op, kernel_op, like
from linrec.ops.core.precision import real_dtype, widened
from linrec.ops.gate_loop import chunks
from linrec.ops.gate_loop.chunks import CHANNEL, HEAD, NONE, Chunks
from linrec.ops.gate_loop.inputs import GateLoop, Matrix, Values
from linrec.ops.gate_loop.numba import twin
from linrec.ops.gate_loop.real_form import complex_form, in_real_form, real_form
from linrec.ops.kernels import Kernels
from linrec.ops.kernels.launch import mask, on_device, power_of_2

STEPS = Kernels("matrix.steps_triton")
# numbers of a state that one program has in its registers
STATE = 4096


def _forward_steps(out: Values, given: Matrix) -> None:
    import triton.language as tl

    q, k, v, beta, log_decay, _, state, cut = given
    q, k, v, state = (x.contiguous() for x in (q, k, v, state))
    batch, time, heads, dk = q.shape
    dv = v.shape[-1]
    # what is not there is never read; any pointer will do
    decays, decay = q, NONE
    strides: tuple[int, ...] = (0, 0, 0)
    if log_decay is not None:
        decays = log_decay.contiguous().expand(batch, time, -1, -1)
        strides, decay = decays.stride()[:3], CHANNEL if log_decay.shape[-1] > 1 else HEAD
    block_k = power_of_2(dk)
    block_v = max(1, min(power_of_2(dv), STATE // block_k))
    with on_device(q.device):
        STEPS.steps[(-(-dv // block_v) * batch * heads,)](
            q, k, v, q if beta is None else beta.contiguous(), decays, mask(cut, q), state, out.y, out.last,
            time, strides, HEADS=heads, DK=dk, DV=dv, DECAY=decay, DELTA=beta is not None,
            RESET=cut is not None, BLOCK_K=block_k, BLOCK_V=block_v,
            WIDE=tl.float64 if state.dtype == torch.float64 else tl.float32, num_warps=4, num_stages=1,
        )  # fmt: skip


steps = forward_op(
    "matrix_steps_triton",
    Matrix,
    Values,
    lambda given, keep: (like(given.v), like(given.state), NOTHING),
    _forward_steps,
    batch="q",
)


def run_steps(given: Matrix) -> tuple[Tensor, Tensor]:
    """Return y and the last state."""
    y, last, _ = steps(given)
    return y, last


recurrent = in_real_form(run_steps)


def _memory(given: Matrix, keep: bool) -> Any:
    q, log_decay = given.q, given.log_decay
    batch, time, heads, _ = q.shape
    # the matrices A of chunks (b, h, chunks, C, C), where every channel decays for itself
    shape = batch, heads, -(-time // chunks.CHUNK), chunks.CHUNK, chunks.CHUNK
    if log_decay is None or log_decay.shape[-1] == 1:
        shape = batch, 0, 0, 0, 0
    return like(given.v), like(given.state), Memory(shape, q.dtype)


def _forward(out: Values, given: Matrix) -> None:
    call = Chunks(given)
    # differences of sums are made once, for all that is weighed by them
    weighed = call.decay == CHANNEL and not call.exact
    read, written = call.q, call.k
    if call.decay == CHANNEL:
        read, written = call.mixings(out.kept, weigh=weighed)
    states = call.states(written, call.v, given.state, out.last, weighed=weighed)
    call.mixed(out.y, call.v, out.kept, states, read=read if weighed else None)


def _adjoint(out: Any, given: Matrix, kept: Values, d: Values) -> None:
    """Fill the gradients.

    The states before the chunks are made again: keeping them takes as much memory as q, k, v and y together.
    """
    call, dy = Chunks(given), d.y.contiguous()
    gradients = call.states(call.q, dy, d.last, out.state, reverse=True)
    call.mixed(out.v, dy, kept.kept, gradients, reverse=True)
    last = torch.empty_like(out.state)
    states = call.states(call.k, call.v, given.state, last)
    passing = call.decay_gradient()
    call.gate_gradients(out, dy, call.v, states, gradients, passing=passing)
    if out.log_decay is not None:
        out.log_decay.copy_(call.summed(passing, out.log_decay))
    if out.phase is not None:
        after = torch.cat([states[:, :, 1:], last[:, :, None].to(states.dtype)], dim=2)
        out.phase.copy_(_phase_gradient((call.q, out.q), (call.k, out.k), (after, gradients), out.phase))


Pair = tuple[Tensor, Tensor]


def _phase_gradient(q: Pair, k: Pair, states: Pair, phase: Tensor) -> Tensor:
    """What turning step j turns: what is read at n >= j, less what is written there, and what goes on.

    Args:
        q: q of `real_form` (b, t, h, 2 dk), and its gradient; so is `k`.
        k: likewise.
        states: after each chunk (b, h, chunks, 2 dk, dv), and their gradients.
        phase: (b or 1, t or 1, h, dk or 1).

    Returns:
        The gradient of `phase`. Sums run over a chunk: over a long sequence they would lose their digits.
    """
    turned = -_turn(*q) - _turn(*k)
    going_on = _turn(*(x.movedim(-2, -1) for x in states)).sum(-2).movedim(1, 2)
    batch, time, *channels = turned.shape
    chunk = chunks.CHUNK
    missing = -time % chunk
    turned = torch.cat([turned, turned.new_zeros(batch, missing, *channels)], dim=1) if missing else turned
    sums = turned.unflatten(1, (-1, chunk)).flip(2).cumsum(2).flip(2) + going_on[:, :, None]
    # compiled code is told of a tensor without the steps that were added
    return sums.flatten(1, 2)[:, :time].sum_to_size(phase.shape).to(phase.dtype).contiguous()


def _turn(x: Tensor, gradient: Tensor) -> Tensor:
    """The gradient of an angle that x (..., 2 dk), as (real, imaginary), turns by."""
    wide = torch.promote_types(x.dtype, torch.float32)
    real, imaginary = x.to(wide).chunk(2, dim=-1)
    of_real, of_imaginary = gradient.to(wide).chunk(2, dim=-1)
    return of_imaginary * real - of_real * imaginary


matrix_chunks = kernel_op(
    "gate_loop_chunkwise_triton",
    Matrix,
    Values,
    _memory,
    _forward,
    _adjoint,
    again=by_autograd(twin),
    batch="q",
    kept=("kept",),
)


@isolated
def chunkwise(given: GateLoop) -> tuple[Tensor, Tensor]:
    """Pairs of steps within chunks on tensor cores, the recurrence between them; inputs in any precision."""
    q, k, v, log_decay, phase, _, state, reset = given
    angle = None
    if state.is_complex():
        precision, turned = real_dtype(q.dtype), widened(given)
        phase = turned.phase
        q, k, log_decay, state, angle = real_form(turned.q, turned.k, turned.log_decay, phase, state)
        q, k = q.to(precision), k.to(precision)
    elif q.is_complex():
        q = q.real
    y, last, _ = matrix_chunks(Matrix(q, k, v, None, log_decay, phase, state, reset))
    return y, last if angle is None else complex_form(last, angle)
