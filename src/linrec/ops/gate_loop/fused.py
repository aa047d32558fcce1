"""The max-headed GateLoop (dk = dv = 1) on GPUs: gates, recurrence and output in one Triton kernel.

It is `elementwise` over `ops.scan`'s Triton backend without what that writes and reads in between: a and k v
in complex numbers, and their gradients.
"""

import contextlib
import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from linrec.ops.gate_loop.torch import elementwise

ROWS = 64
"""Steps of one tile, at most."""

COLUMNS = 16
"""Heads of one program, at most."""

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
    """Run the recurrence; arguments and results are those of `linrec.ops.gate_loop.torch.elementwise`."""
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
    """y, hidden, last = FusedGateLoop.apply(q, k, v, log_decay, phase, state, cut).

    The states `hidden` are kept for the adjoint and have no gradient of their own.
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
        *inputs, hidden = ctx.saved_tensors
        if torch.is_grad_enabled():
            return (*_differentiable_backward(ctx.needs_input_grad, inputs, dy, dlast), None)
        gradients = backward(*inputs, hidden, dy, dlast)
        needed = ctx.needs_input_grad[:6]
        return (*(g if need else None for g, need in zip(gradients, needed, strict=True)), None)


def _differentiable_backward(
    needed: tuple[bool, ...], inputs: list[Any], dy: Tensor, dlast: Tensor
) -> list[Any]:
    q, k, v, log_decay, phase, state, cut = inputs
    log_decay, phase = (g if g is None or g.ndim == 3 else g[None, None] for g in (log_decay, phase))
    q, k, v, state = q[..., None], k[..., None], v[..., None], state[..., None, None]
    log_decay, phase = (g if g is None else g[..., None] for g in (log_decay, phase))
    y, last = elementwise(q, k, v, log_decay, phase, state, cut, mode="scan", backend="torch")
    wanted = [x for x, need in zip(inputs, needed, strict=True) if need]
    outputs = y.squeeze(-1), last.flatten(1)
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
    """Return y (b, t, h), the states as real planes (1 or 2, b, t, h), and the last state (b, h)."""
    y, hidden, last = _outputs(q, state)
    _launch(
        "forward",
        q,
        *_plain(q, k, v, log_decay, phase, state),
        q if cut is None else cut.contiguous().view(torch.uint8),
        y,
        hidden,
        _real(last),
        DECAY=_kind(log_decay),
        PHASE=_kind(phase),
        HAS_STATE=True,
        HAS_CUT=cut is not None,
    )
    return y, hidden, last


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
    return _outputs(q, state)


@torch.library.custom_op("linrec::gate_loop_triton_backward", mutates_args=())
def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    phase: Tensor | None,
    state: Tensor,
    cut: Tensor | None,
    hidden: Tensor,
    dy: Tensor,
    dlast: Tensor,
) -> Gradients:
    """Return the gradients of all inputs but `cut`; that of a gate which is None is empty."""
    batch = q.shape[0]
    dq, dk, dv = (torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(3))
    gates = [
        q.new_empty(0) if gate is None else q.new_empty(q.shape if gate.ndim == 3 else (batch, *gate.shape))
        for gate in (log_decay, phase)
    ]
    dstate = torch.empty_like(state, memory_format=torch.contiguous_format)
    _launch(
        "backward",
        q,
        *_plain(q, k, v, log_decay, phase),
        q if cut is None else cut.contiguous().view(torch.uint8),
        *_plain(hidden, dy, dlast),
        dq,
        dk,
        dv,
        *gates,
        _real(dstate),
        DECAY=_kind(log_decay),
        PHASE=_kind(phase),
        HAS_CUT=cut is not None,
    )
    ddecay, dphase = (g.sum(0) if g.ndim == 2 else g for g in gates)
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
    hidden: Tensor,
    dy: Tensor,
    dlast: Tensor,
) -> Gradients:
    ddecay, dphase = (q.new_empty(0 if gate is None else gate.shape) for gate in (log_decay, phase))
    return *(q.new_empty(q.shape) for _ in range(3)), ddecay, dphase, state.new_empty(state.shape)  # type: ignore[return-value]


@functools.cache
def _kernels() -> ModuleType:
    from linrec.ops.gate_loop import fused_kernels

    return fused_kernels


def _outputs(q: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    planes = 2 if state.is_complex() else 1
    return q.new_empty(q.shape), q.new_empty(planes, *q.shape), state.new_empty(state.shape)


def _kind(gate: Tensor | None) -> int:
    # NONE, STEP and CONSTANT of the kernels
    return 0 if gate is None else 1 if gate.ndim == 3 else 2


def _plain(*tensors: Tensor | None) -> list[Tensor]:
    # what is None is never read; any pointer will do
    first = tensors[0]
    return [_real(first if x is None else x).contiguous() for x in tensors]  # type: ignore[arg-type]


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.resolve_neg()


def _launch(name: str, q: Tensor, *arguments: Any, **constants: Any) -> None:
    import triton
    import triton.language as tl

    batch, time, channels = q.shape
    if q.numel() == 0:
        return
    rows = min(ROWS, max(16, triton.next_power_of_2(time)))
    columns = min(COLUMNS, triton.next_power_of_2(channels))
    grid = (batch * triton.cdiv(channels, columns),)
    wide = tl.float64 if q.dtype == torch.float64 else tl.float32
    # Triton launches on the current device, whatever the tensors' one
    with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
        getattr(_kernels(), name)[grid](
            *arguments, time, channels, q.numel(), **constants, WIDE=wide, ROWS=rows, COLUMNS=columns
        )
