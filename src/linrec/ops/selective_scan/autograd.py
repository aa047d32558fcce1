"""The gradient of the selective scan, whoever runs it: from the states that chunks of steps start from."""

import inspect
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from linrec.ops.operators import differentiable_gradients, differentiated
from linrec.ops.selective_scan import numba as numba_backend
from linrec.ops.selective_scan import torch as torch_backend
from linrec.ops.selective_scan import triton as triton_backend

_BACKENDS: dict[str, ModuleType] = {
    "torch": torch_backend,
    "numba": numba_backend,
    "triton": triton_backend,
}


def run(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Return (y, last) of x, dt, A, B, C, D, state, cut and the backend, as `SelectiveScan` takes them."""
    if differentiated(*inputs[:7]):
        y, last, _ = SelectiveScan.apply(*inputs)
    else:
        *given, backend = inputs
        y, last, _ = _BACKENDS[backend].forward(*given, keep=False)
    return y, last


class SelectiveScan(torch.autograd.Function):
    """y, last, starts = SelectiveScan.apply(x, dt, A, B, C, D, state, cut, backend).

    Shapes are those of `linrec.ops.selective_scan.torch.forward`; x, dt, B and C come in any precision. The
    states `starts`, which chunks of steps start from, are kept for the adjoint and have no gradient of their
    own.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor,
        state: Tensor,
        cut: Tensor | None,
        backend: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the recurrence on the backend."""
        return _BACKENDS[backend].forward(x, dt, A, B, C, D, state, cut, keep=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        """Keep the inputs and a few states."""
        *tensors, ctx.backend = inputs
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(*tensors, output[2])

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dlast: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Run the adjoint on the same backend, or by autograd where it is to be differentiated again."""
        *inputs, starts = ctx.saved_tensors
        needed = ctx.needs_input_grad[:7]
        if torch.is_grad_enabled():
            y, last, _ = torch_backend.forward(*(*inputs, False))
            return (*differentiable_gradients((y, last), inputs, needed, (dy, dlast)), None, None)
        gradients = _BACKENDS[ctx.backend].backward(*inputs, starts, dy, dlast)
        each = zip(gradients, inputs, needed, strict=False)
        return (*(g.to(x.dtype) if need else None for g, x, need in each), None, None)


# autograd asks for it at every call, and making it takes longer than a small recurrence
SelectiveScan.forward.__signature__ = inspect.signature(SelectiveScan.forward)  # type: ignore[attr-defined]
