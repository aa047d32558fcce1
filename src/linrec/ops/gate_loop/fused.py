"""The max-headed GateLoop (dk = dv = 1) of real q and k: gates, recurrence and output in one kernel.

It is `elementwise` without what that writes and reads in between: a, k v and the states, and their gradients.
Of the states, one per piece of time is kept, from which the adjoint makes the others again.
"""

import inspect
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from linrec.ops.dispatch import Pair
from linrec.ops.gate_loop import fused_numba, fused_triton
from linrec.ops.gate_loop.torch import elementwise
from linrec.ops.operators import differentiable_gradients, differentiated
from linrec.ops.precision import widened

_BACKENDS: dict[str, ModuleType] = {"numba": fused_numba, "triton": fused_triton}
PAIRS: tuple[Pair, ...] = (("recurrent", "numba"), ("scan", "triton"))


def applies(pair: Pair, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether there is a kernel for these inputs: real ones, with heads of one channel."""
    return pair in PAIRS and q.shape[-1] == v.shape[-1] == 1 and not (q.is_complex() or k.is_complex())


def fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    phase: Tensor | None,
    state: Tensor,
    reset: Tensor | None,
    *,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence; arguments and results are those of `linrec.ops.gate_loop.torch.elementwise`.

    q, k, v and the gates come in any precision, and y and the gradients leave in theirs.
    """
    flat: list[Any] = [x if x is None else x.squeeze(-1) for x in (q, k, v, log_decay, phase)]
    if backend == "numba":
        # its kernels are compiled for one precision of all inputs
        flat = widened(*flat)
    inputs = (*flat, state.flatten(1), reset, backend)
    run = FusedGateLoop.apply if differentiated(*inputs[:6]) else FusedGateLoop.forward
    y, last, _ = run(*inputs)
    return y.unsqueeze(-1), last.unflatten(-1, state.shape[1:])


class FusedGateLoop(torch.autograd.Function):
    """y, last, starts = FusedGateLoop.apply(q, k, v, log_decay, phase, state, cut, backend).

    Gates are (b, t, h), or (1, 1, h) where they are constant. The states `starts`, which pieces of time start
    from, are kept for the adjoint and have no gradient of their own.
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
        backend: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the kernel."""
        return _BACKENDS[backend].forward(q, k, v, log_decay, phase, state, cut)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        """Keep the inputs and a few states."""
        *tensors, ctx.backend = inputs
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(*tensors, output[2])

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dlast: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Run the adjoint kernel, or torch operations where the gradient is to be differentiated again."""
        *inputs, starts = ctx.saved_tensors
        needed = ctx.needs_input_grad[:6]
        if torch.is_grad_enabled():
            return (*_differentiable_backward(needed, inputs, dy, dlast), None, None)
        gradients = _BACKENDS[ctx.backend].backward(*inputs, starts, dy, dlast)
        return (*(g if need else None for g, need in zip(gradients, needed, strict=True)), None, None)


# autograd asks for it at every call, and making it takes longer than a small recurrence
FusedGateLoop.forward.__signature__ = inspect.signature(FusedGateLoop.forward)  # type: ignore[attr-defined]


def _differentiable_backward(
    needed: tuple[bool, ...], inputs: list[Any], dy: Tensor, dlast: Tensor
) -> list[Any]:
    *flat, state, cut = inputs
    wide = [x if x is None else x[..., None] for x in widened(*flat)]
    run: Callable[..., tuple[Tensor, Tensor]] = partial(elementwise, mode="scan", backend="torch")
    y, last = run(*wide, state[..., None, None], cut)
    outputs = y.squeeze(-1).to(dy.dtype), last.flatten(1)
    return differentiable_gradients(outputs, inputs, needed, (dy, dlast))
