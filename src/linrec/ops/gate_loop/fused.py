"""Recurrences that kernels of their own run, and their gradients.

The max-headed GateLoop (dk = dv = 1) of real q and k is one kernel: `elementwise` without what that writes
and reads in between: a, k v and the states, and their gradients. Of the states, one per piece of time is
kept, from which the adjoint makes the others again. Larger heads have the chunkwise mode on tensor cores.
"""

import inspect
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from linrec.ops.dispatch import Pair
from linrec.ops.gate_loop import chunkwise_triton, fused_numba, fused_triton
from linrec.ops.gate_loop.chunkwise import chunkwise
from linrec.ops.gate_loop.inputs import widened
from linrec.ops.gate_loop.torch import elementwise
from linrec.ops.operators import differentiated

_BACKENDS: dict[Pair, ModuleType] = {
    ("recurrent", "numba"): fused_numba,
    ("scan", "triton"): fused_triton,
    ("chunkwise", "triton"): chunkwise_triton,
}


def applies(pair: Pair, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether a pair has kernels of its own for these inputs."""
    if pair == ("chunkwise", "triton"):
        return True
    return pair in _BACKENDS and q.shape[-1] == v.shape[-1] == 1 and not (q.is_complex() or k.is_complex())


def fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    phase: Tensor | None,
    state: Tensor,
    reset: Tensor | None,
    *,
    pair: Pair,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence; arguments and results are those of `linrec.ops.gate_loop.torch.elementwise`.

    q, k, v and the gates come in any precision, and y and the gradients leave in theirs.
    """
    if pair == ("chunkwise", "triton"):
        return _on_tensor_cores(q, k, v, log_decay, phase, state, reset)
    flat: list[Any] = [x if x is None else x.squeeze(-1) for x in (q, k, v, log_decay, phase)]
    if pair[1] == "numba":
        # its kernels are compiled for one precision of all inputs
        flat = widened(*flat)
    inputs = (*flat, state.flatten(1), reset, pair)
    run = FusedGateLoop.apply if differentiated(*inputs[:6]) else FusedGateLoop.forward
    y, last, _ = run(*inputs)
    return y.unsqueeze(-1), last.unflatten(-1, state.shape[1:])


def _on_tensor_cores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    phase: Tensor | None,
    state: Tensor,
    reset: Tensor | None,
) -> tuple[Tensor, Tensor]:
    turned = None
    if state.is_complex():
        q, k, log_decay, state, turned = chunkwise_triton.real_form(q, k, log_decay, phase, state)
    inputs = (q, k, v, log_decay, None, state, reset, ("chunkwise", "triton"))
    run = FusedGateLoop.apply if differentiated(*inputs[:6]) else FusedGateLoop.forward
    y, last, _ = run(*inputs)
    return y, last if turned is None else chunkwise_triton.complex_form(last, turned)


class FusedGateLoop(torch.autograd.Function):
    """y, last, starts = FusedGateLoop.apply(q, k, v, log_decay, phase, state, cut, pair).

    Heads of one channel come without that axis; gates are then (b, t, h), or (1, 1, h) where they are
    constant. The states `starts`, which pieces of time start from, are kept for the adjoint and have no
    gradient of their own.
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
        pair: Pair,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the kernel."""
        return _BACKENDS[pair].forward(q, k, v, log_decay, phase, state, cut)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        """Keep the inputs and a few states."""
        *tensors, ctx.pair = inputs
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(*tensors, output[2])

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dlast: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Run the adjoint kernel, or torch operations where the gradient is to be differentiated again."""
        *inputs, starts = ctx.saved_tensors
        needed = ctx.needs_input_grad[:6]
        if torch.is_grad_enabled():
            return (*_differentiable_backward(needed, inputs, dy, dlast), None, None)
        gradients = _BACKENDS[ctx.pair].backward(*inputs, starts, dy, dlast)
        return (*(g if need else None for g, need in zip(gradients, needed, strict=True)), None, None)


# autograd asks for it at every call, and making it takes longer than a small recurrence
FusedGateLoop.forward.__signature__ = inspect.signature(FusedGateLoop.forward)  # type: ignore[attr-defined]


def _differentiable_backward(
    needed: tuple[bool, ...], inputs: list[Any], dy: Tensor, dlast: Tensor
) -> list[Any]:
    *tensors, state, cut = inputs
    wide = widened(*tensors)
    if state.ndim == 4:
        in_chunks: Callable[..., tuple[Tensor, Tensor]] = chunkwise
        y, last = in_chunks(*wide, state, cut)
    else:
        by_entry: Callable[..., tuple[Tensor, Tensor]] = partial(elementwise, mode="scan", backend="torch")
        heads = [x if x is None else x[..., None] for x in wide]
        y, last = by_entry(*heads, state[..., None, None], cut)
        y, last = y.squeeze(-1), last.flatten(1)
    wanted = [x for x, need in zip(inputs, needed, strict=False) if need]
    outputs = y.to(dy.dtype), last
    gradients = iter(torch.autograd.grad(outputs, wanted, (dy, dlast), create_graph=True, allow_unused=True))
    return [next(gradients) if need else None for need in needed]
