"""The one gradient formula of the elementwise recurrence, whoever runs it.

With y_t = a_t y_{t-1} + x_t and the gradients dy of the outputs and dlast of the final state, the gradient of
step t is g_t = dy_t + conj(a_{t+1}) g_{t+1}, to which dlast is added at the last step. Then

    dx_t = g_t        da_t = g_t conj(y_{t-1})        dstate = conj(a_1) g_1
"""

import inspect
from typing import Any

import torch
from torch import Tensor

from linrec.ops.dispatch import Pair
from linrec.ops.scan import numba as numba_backend
from linrec.ops.scan import torch as torch_backend
from linrec.ops.scan import triton as triton_backend


class Scan(torch.autograd.Function):
    """y, last = Scan.apply(a, x, state, cut, reverse, pair).

    `a` has three axes, each of x's size or 1; `cut` (b, t) says where a_t counts as zero; `state` has the
    accumulation dtype or is None.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        a: Tensor, x: Tensor, state: Tensor | None, cut: Tensor | None, reverse: bool, pair: Pair
    ) -> tuple[Tensor, Tensor]:
        """Run the recurrence on the backend of `pair`."""
        mode, backend = pair
        if backend == "numba":
            return numba_backend.forward(a, x, state, cut, reverse)
        if backend == "triton":
            return triton_backend.forward(a, x, state, cut, reverse)
        return torch_backend.forward(a, x, state, cut, reverse, mode == "scan")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Keep what the adjoint reads: a, y, and not x."""
        a, x, state, cut, ctx.reverse, ctx.pair = inputs
        ctx.x_dtype = x.dtype
        y = output[0]
        # a compiler also keeps the real view of y that a caller takes, and writes over one of two tensors in
        # the backward pass without seeing that they share memory (torch 2.13): there must be no second one.
        # Only the output itself has a derivative in turn, which compiled code does not have anyway
        if torch.compiler.is_compiling() and y.is_complex():
            y = torch.view_as_real(y)
        ctx.save_for_backward(a, y, state, cut)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
        """Run the adjoint recurrence on the same backend, then reduce to the inputs' shapes and dtypes."""
        a, y, state, cut = ctx.saved_tensors
        if y.dim() > a.dim():
            y = torch.view_as_complex(y)
        needs_a, needs_x, needs_state = ctx.needs_input_grad[:3]
        mode, backend = ctx.pair
        # kernels have no derivative of their own: a gradient that is to be differentiated again, as under
        # torch.func.grad, is made of torch operations
        if torch.is_grad_enabled():
            mode, backend = "scan", "torch"
        arguments = (a, y, state, cut, dy, dlast, ctx.reverse, needs_a)
        if backend == "numba":
            da, dx, dstate = numba_backend.backward(*arguments)
        elif backend == "triton":
            da, dx, dstate = triton_backend.backward(*arguments)
        else:
            da, dx, dstate = torch_backend.backward(*arguments, mode == "scan")
        return (
            _reduced(da, a.dtype) if needs_a else None,
            _reduced(dx, ctx.x_dtype) if needs_x else None,
            dstate if needs_state else None,
            None,
            None,
            None,
        )


# autograd asks for it at every call, and making it takes longer than a small recurrence
Scan.forward.__signature__ = inspect.signature(Scan.forward)  # type: ignore[attr-defined]


def _reduced(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    # the gradient of a real number is the real part of the complex one
    if gradient.is_complex() and not dtype.is_complex:
        gradient = gradient.real
    return gradient.to(dtype)
