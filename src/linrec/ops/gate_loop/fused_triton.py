"""The fused max-headed GateLoop on GPUs: gates, recurrence and output in one Triton kernel."""

import functools
from types import ModuleType

import torch
from torch import Tensor

from linrec.ops import vmap
from linrec.ops.kernels.launch import Tiling, grouping, launch, n_tiles, real
from linrec.ops.operators import operator
from linrec.ops.precision import accumulation

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@operator("gate_loop_triton")
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    phase: Tensor | None,
    state: Tensor,
    cut: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y (b, t, h), the last state (b, h), and those that pieces of time start from (b, pieces, h)."""
    y, last, starts = _outputs(q, v, state)
    if y.numel() > 0:
        launch(
            _kernels().forward,
            tiling(q.shape),
            q.shape,
            state.dtype,
            q.device,
            104,
            *(real(_or_any(x, q).contiguous()) for x in (q, k, v, log_decay, phase)),
            real(state.contiguous()),
            q if cut is None else cut.contiguous().view(torch.uint8),
            y,
            real(starts),
            real(last),
            DECAY=_kind(log_decay, q),
            PHASE=_kind(phase, q),
            HAS_CUT=cut is not None,
        )
    return y, last, starts


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
    return _outputs(q, v, state)


@operator("gate_loop_triton_backward")
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
    plan = tiling(q.shape)
    batch, time, heads = q.shape
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    # gradients of constant gates are summed in a tile by the kernel, and over tiles and the batch below
    sums = (batch, n_tiles(time, plan), heads)
    gates = [
        q.new_empty(0)
        if gate is None
        else torch.empty(gate.shape, dtype=gate.dtype, device=q.device)
        if _kind(gate, q) == 1
        else torch.empty(sums, dtype=accumulation(gate.dtype), device=q.device)
        for gate in (log_decay, phase)
    ]
    dstate = torch.empty_like(state, memory_format=torch.contiguous_format)
    if q.numel() > 0:
        launch(
            _kernels().backward,
            plan,
            q.shape,
            state.dtype,
            q.device,
            168,
            *(real(_or_any(x, q).contiguous()) for x in (q, k, v, log_decay, phase)),
            q if cut is None else cut.contiguous().view(torch.uint8),
            *(real(x.contiguous()) for x in (starts, dy, dlast)),
            dq,
            dk,
            dv,
            *gates,
            real(dstate),
            DECAY=_kind(log_decay, q),
            PHASE=_kind(phase, q),
            HAS_CUT=cut is not None,
        )
    ddecay, dphase = (
        total.sum((0, 1), keepdim=True).to(gate.dtype) if gate is not None and _kind(gate, q) == 2 else total
        for gate, total in zip((log_decay, phase), gates, strict=True)
    )
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
    starts: Tensor,
    dy: Tensor,
    dlast: Tensor,
) -> Gradients:
    ddecay, dphase = (
        q.new_empty(0) if gate is None else gate.new_empty(gate.shape) for gate in (log_decay, phase)
    )
    dq, dk, dv, dstate = (x.new_empty(x.shape) for x in (q, k, v, state))
    return dq, dk, dv, ddecay, dphase, dstate


@functools.cache
def _kernels() -> ModuleType:
    from linrec.ops.kernels.elementwise import max_headed_triton as fused_triton_kernels

    return fused_triton_kernels


def tiling(shape: tuple[int, ...]) -> Tiling:
    """Return the division of time for q of this shape (b, t, h): measured, on an H200.

    A thread holds more numbers per step than in `ops.scan`, so fewer steps. The pieces are the same for every
    length, so that a model compiled for any length serves all.
    """
    batch, _, heads = shape
    columns = 64 if heads > 32 else 32
    groups = grouping(batch * -(-heads // columns))
    return Tiling(4, 8, columns, columns // 32, *groups, warps=4)


def _outputs(q: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    plan = tiling(q.shape)
    batch, time, heads = q.shape
    starts = state.new_empty(batch, n_tiles(time, plan) * plan.pieces, heads)
    return v.new_empty(v.shape), state.new_empty(state.shape), starts


def _kind(gate: Tensor | None, q: Tensor) -> int:
    # NONE, STEP and CONSTANT of the kernels
    return 0 if gate is None else 1 if gate.shape == q.shape else 2


def _or_any(tensor: Tensor | None, other: Tensor) -> Tensor:
    # what is None is never read; any pointer will do
    return other if tensor is None else tensor


vmap.register(forward, backward)
