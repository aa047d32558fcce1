"""The max-headed GateLoop (dk = dv = 1) on GPUs: gates, recurrence and output in one Triton kernel.

It is `elementwise` over `ops.scan`'s Triton backend without what that writes and reads in between: a, k v and
the states in complex numbers, and their gradients. Of the states, those between pieces of time are kept.
"""

import functools
import inspect
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from linrec.ops.gate_loop.inputs import accumulation, widened
from linrec.ops.gate_loop.torch import elementwise
from linrec.ops.triton_launch import Tiling, grouping, launch, n_tiles, power_of_2, real

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def applies(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether the kernels serve these inputs: real ones, with heads of one channel."""
    return q.shape[-1] == v.shape[-1] == 1 and not (q.is_complex() or k.is_complex())


def fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    phase: Tensor | None,
    state: Tensor,
    reset: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence; arguments and results are those of `linrec.ops.gate_loop.torch.elementwise`.

    q, k, v and the gates come in any precision, and y and the gradients leave in theirs.
    """
    y, _, last = FusedGateLoop.apply(
        *(x.squeeze(-1) for x in (q, k, v)),
        *(_flat(gate, q) for gate in (log_decay, phase)),
        state.flatten(1),
        reset,
    )
    return y.unsqueeze(-1), last.unflatten(-1, state.shape[1:])


def _flat(gate: Tensor | None, q: Tensor) -> Tensor | None:
    """Return a gate as (b, t, h), or as (h,) where it is constant in time."""
    if gate is None:
        return None
    gate = gate.squeeze(-1)
    return gate if gate.shape[:2] == q.shape[:2] else gate[0, 0]


class FusedGateLoop(torch.autograd.Function):
    """y, befores, last = FusedGateLoop.apply(q, k, v, log_decay, phase, state, cut).

    The states `befores`, before each piece of time, are kept for the adjoint and have no gradient of their
    own.
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
        """Run the kernel."""
        return forward(q, k, v, log_decay, phase, state, cut)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        """Keep the inputs and the states."""
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs, output[1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
        """Run the adjoint kernel, or torch operations where the gradient is to be differentiated again."""
        *inputs, befores = ctx.saved_tensors
        if torch.is_grad_enabled():
            return (*_differentiable_backward(ctx.needs_input_grad, inputs, dy, dlast), None)
        gradients = backward(*inputs, befores, dy, dlast)
        needed = ctx.needs_input_grad[:6]
        return (*(g if need else None for g, need in zip(gradients, needed, strict=True)), None)


# autograd asks for it at every call, and making it takes longer than a small recurrence
FusedGateLoop.forward.__signature__ = inspect.signature(FusedGateLoop.forward)  # type: ignore[attr-defined]


def _differentiable_backward(
    needed: tuple[bool, ...], inputs: list[Any], dy: Tensor, dlast: Tensor
) -> list[Any]:
    *tensors, state, cut = inputs
    q, k, v, log_decay, phase = widened(*tensors)
    log_decay, phase = (g if g is None or g.ndim == 3 else g[None, None] for g in (log_decay, phase))
    q, k, v, state = q[..., None], k[..., None], v[..., None], state[..., None, None]
    log_decay, phase = (g if g is None else g[..., None] for g in (log_decay, phase))
    y, last = elementwise(q, k, v, log_decay, phase, state, cut, mode="scan", backend="torch")
    wanted = [x for x, need in zip(inputs, needed, strict=True) if need]
    outputs = y.squeeze(-1).to(dy.dtype), last.flatten(1)
    gradients = iter(torch.autograd.grad(outputs, wanted, (dy, dlast), create_graph=True, allow_unused=True))
    return [next(gradients) if need else None for need in needed[:6]]


@torch.library.custom_op("linrec::gate_loop_triton", mutates_args=())
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    phase: Tensor | None,
    state: Tensor,
    cut: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y (b, t, h), the states before each piece of time (b, pieces, h) and the last state (b, h)."""
    y, befores, last = _outputs(q, v, state)
    if y.numel() > 0:
        launch(
            _kernels().forward,
            tiling(q.shape),
            q.shape,
            state.dtype,
            q.device,
            *(real(_or_any(x, q).contiguous()) for x in (q, k, v, log_decay, phase)),
            real(state.contiguous()),
            q if cut is None else cut.contiguous().view(torch.uint8),
            y,
            real(befores),
            real(last),
            DECAY=_kind(log_decay),
            PHASE=_kind(phase),
            HAS_CUT=cut is not None,
        )
    return y, befores, last


@forward.register_fake
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


@torch.library.custom_op("linrec::gate_loop_triton_backward", mutates_args=())
def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    phase: Tensor | None,
    state: Tensor,
    cut: Tensor | None,
    befores: Tensor,
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
        if gate.ndim == 3
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
            *(real(_or_any(x, q).contiguous()) for x in (q, k, v, log_decay, phase)),
            q if cut is None else cut.contiguous().view(torch.uint8),
            *(real(x.contiguous()) for x in (befores, dy, dlast)),
            dq,
            dk,
            dv,
            *gates,
            real(dstate),
            DECAY=_kind(log_decay),
            PHASE=_kind(phase),
            HAS_CUT=cut is not None,
        )
    ddecay, dphase = (
        total.sum((0, 1)).to(gate.dtype) if gate is not None and gate.ndim == 1 else total
        for gate, total in zip((log_decay, phase), gates, strict=True)
    )
    return dq, dk, dv, ddecay, dphase, dstate


@backward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    phase: Tensor | None,
    state: Tensor,
    cut: Tensor | None,
    befores: Tensor,
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
    from linrec.ops.gate_loop import fused_kernels

    return fused_kernels


def tiling(shape: tuple[int, ...]) -> Tiling:
    """Return the division of time for q of this shape (b, t, h): measured, on an H200.

    A thread holds more numbers per step than in `ops.scan`, so fewer steps. The pieces are the same for every
    length, so that a model compiled for any length serves all.
    """
    batch, _, heads = shape
    # with 32 columns and as many warps as pieces, threads hold all tensors of the kernels in the same way
    columns = min(32, power_of_2(heads))
    groups = grouping(batch * -(-heads // 32))
    return Tiling(4, 8, columns, min(2, columns), *groups, warps=4)


def _outputs(q: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    plan = tiling(q.shape)
    batch, time, heads = q.shape
    befores = state.new_empty(batch, n_tiles(time, plan) * plan.pieces, heads)
    return v.new_empty(v.shape), befores, state.new_empty(state.shape)


def _kind(gate: Tensor | None) -> int:
    # NONE, STEP and CONSTANT of the kernels
    return 0 if gate is None else 1 if gate.ndim == 3 else 2


def _or_any(tensor: Tensor | None, other: Tensor) -> Tensor:
    # what is None is never read; any pointer will do
    return other if tensor is None else tensor
