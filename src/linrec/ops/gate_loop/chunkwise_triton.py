"""The chunkwise mode on GPUs: matrix products of chunks on tensor cores."""

import inspect
from typing import Any

import torch
from torch import Tensor

from linrec.ops import matrix_torch, vmap
from linrec.ops.core.isolation import isolated
from linrec.ops.gate_loop import chunkwise_triton_chunks
from linrec.ops.gate_loop.chunkwise_triton_chunks import CHANNEL, Chunks
from linrec.ops.gate_loop.real_form import complex_form, real_form
from linrec.ops.operators import differentiated, operator
from linrec.ops.precision import real_dtype, widened

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@isolated(log_decay=3)
def chunkwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    phase: Tensor | None,
    state: Tensor,
    reset: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence; arguments and results as in `torch.py`, q, k, v and gates in any precision."""
    angle = None
    if state.is_complex():
        precision = real_dtype(q.dtype)
        wide_q, wide_k, wide_decay, phase = widened(q, k, log_decay, phase)
        wide_q, wide_k, log_decay, state, angle = real_form(wide_q, wide_k, wide_decay, phase, state)
        q, k = wide_q.to(precision), wide_k.to(precision)
    elif q.is_complex():
        q = q.real
    inputs = q, k, v, log_decay, phase, state, reset
    run = ChunkwiseGateLoop.apply if differentiated(*inputs[:6]) else ChunkwiseGateLoop.forward
    y, last, _ = run(*inputs)
    return y, last if angle is None else complex_form(last, angle)


class ChunkwiseGateLoop(torch.autograd.Function):
    """y, last, matrices = ChunkwiseGateLoop.apply(q, k, v, log_decay, phase, state, cut).

    The frame turns with the phases, as `real_form` has it: they get their gradient here, and have no part in
    the values. The token-mixing matrices of the chunks are kept for the adjoint.
    """

    generate_vmap_rule = True

    # named parameters, not *arguments: from those, torch.compile without gradients concludes that a context
    # comes first
    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        phase: Tensor | None,
        state: Tensor,
        cut: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the kernels."""
        return forward(q, k, v, log_decay, phase, state, cut)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        """Keep the inputs, and the matrices that every channel's own decays made."""
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(*inputs, output[2])

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dlast: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Run the adjoint kernels, or torch operations where the gradient is to be differentiated again."""
        *inputs, matrices = ctx.saved_tensors
        needed = ctx.needs_input_grad[:6]
        if torch.is_grad_enabled():
            q, k, v, *others = inputs
            given = q, k, v, None, *others
            with_beta = *needed[:3], False, *needed[3:]
            found = matrix_torch.gradients(with_beta, given, dy, dlast)
            return (*found[:3], *found[4:], None)
        gradients = backward(*inputs, matrices, dy, dlast)
        return (*(g if need else None for g, need in zip(gradients, needed, strict=True)), None)


# autograd asks for it at every call, and making it takes longer than a small recurrence
ChunkwiseGateLoop.forward.__signature__ = inspect.signature(  # type: ignore[attr-defined]
    ChunkwiseGateLoop.forward
)


@operator("gate_loop_chunkwise_triton")
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    phase: Tensor | None,
    state: Tensor,
    cut: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y (b, t, h, dv), the last state (b, h, dk, dv), and the matrices A (b, h, chunks, C, C).

    The last are (b, 0, 0, 0, 0) but where every channel decays for itself.
    """
    call = Chunks(q, k, v, log_decay, cut)
    # differences of sums are made once, for all that is weighed by them
    weighed = call.decay == CHANNEL and not call.exact
    matrices, read, written = call.mixings(weigh=True) if weighed else (call.matrices(), call.q, call.k)
    states, last = call.states(written, call.v, state, weighed=weighed)
    y = call.mixed(call.v, matrices, states, read=read if weighed else None)
    return y, last, matrices


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
    return v.new_empty(v.shape), state.new_empty(state.shape), _matrices(q, log_decay)


def _matrices(q: Tensor, log_decay: Tensor | None) -> Tensor:
    batch, time, heads, _ = q.shape
    if log_decay is None or log_decay.shape[-1] == 1:
        return q.new_empty(batch, 0, 0, 0, 0)
    chunk = chunkwise_triton_chunks.CHUNK
    return q.new_empty(batch, heads, -(-time // chunk), chunk, chunk)


@operator("gate_loop_chunkwise_triton_backward")
def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    phase: Tensor | None,
    state: Tensor,
    cut: Tensor | None,
    matrices: Tensor,
    dy: Tensor,
    dlast: Tensor,
) -> Gradients:
    """Return the gradients of all inputs but `cut`; that of a gate which is None is empty.

    The states before the chunks are made again: keeping them takes as much memory as q, k, v and y together.
    """
    call = Chunks(q, k, v, log_decay, cut)
    dy = dy.contiguous()
    gradients, dstate = call.states(call.q, dy, dlast, reverse=True)
    dv = call.mixed(dy, matrices, gradients, reverse=True)
    states, last = call.states(call.k, call.v, state)
    passing = call.decay_gradient()
    dq, dk = call.gate_gradients(dy, call.v, states, gradients, passing)
    ddecay = q.new_empty(0) if log_decay is None else call.summed(passing, log_decay)
    if phase is None:
        dphase = q.new_empty(0)
    else:
        after = torch.cat([states[:, :, 1:], last[:, :, None].to(states.dtype)], dim=2)
        dphase = _phase_gradient((call.q, dq), (call.k, dk), (after, gradients), phase)
    return dq, dk, dv, ddecay, dphase, dstate


@torch.library.register_fake(backward)
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    phase: Tensor | None,
    state: Tensor,
    cut: Tensor | None,
    matrices: Tensor,
    dy: Tensor,
    dlast: Tensor,
) -> Gradients:
    ddecay, dphase = (q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (log_decay, phase))
    dq, dk, dv, dstate = (x.new_empty(x.shape) for x in (q, k, v, state))
    return dq, dk, dv, ddecay, dphase, dstate


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
    chunk = chunkwise_triton_chunks.CHUNK
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


vmap.register(forward, backward)
