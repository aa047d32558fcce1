"""Layers of torch.nn.RNN, LSTM and GRU, run by torch's own kernels or by `nonlinear_scan`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import disable
from torch.nn import functional

from linrec.ops.core.call import handled
from linrec.ops.core.precision import wide, without_autocast
from linrec.ops.nonlinear_scan import leaves_graph, nonlinear_scan
from linrec.ops.nonlinear_scan.torch import Cell
from linrec.torch_private import transforms_active

__all__ = ["RNNWeights", "run_torch_rnn"]

Values = tuple[Tensor, Tensor]
Run = Callable[..., Values]


class RNNWeights(nn.RNNBase):
    """The parameters of one layer of torch.nn.RNN, LSTM or GRU, under the same names.

    No subclass of those layers, which torch.compile refuses to read. A call returns the parameters, so that
    hooks of offloading run.

    Args:
        mode: "RNN_TANH", "RNN_RELU", "LSTM" or "GRU".
        width: of the input and of the state.
    """

    def __init__(self, mode: str, width: int) -> None:
        super().__init__(mode, width, width, batch_first=True)

    def forward(self) -> tuple[Tensor, ...]:
        """Return W, U, b and c."""
        return tuple(self.parameters())


def run_torch_rnn(
    rnn: RNNWeights,
    cell: Cell,
    x: Tensor,
    state: Tensor,
    reset: Tensor | None,
    mode: str,
    *,
    fused: bool = True,
) -> Values:
    """Return the output of one layer of torch.nn and its last state, as `nonlinear_scan` would.

    With "auto" and without resets, torch's kernels run: cuDNN on CUDA, and ATen's or oneDNN's on the CPU. The
    loop of `nonlinear_scan` runs if these kernels do not take the call: in `torch.func`, with inspection, for
    weights in half precision, in exported programs, and in compiled programs of few steps. Long sequences are
    a graph break in compiled programs, as in `nonlinear_scan`. Second derivatives on CUDA repeat the layer in
    the loop.

    Args:
        rnn: the layer's parameters.
        cell: function of the state, W x_t + b, U and c that returns the next state. Here W and b are the
            weights of the input, U and c of the state.
        x: (b, t, d).
        state: (b, n), whose first channels are the output; the two parts of an LSTM's state are joined.
        reset: (b, t) bool, or None.
        mode: mode of `nonlinear_scan`.
        fused: whether torch's kernels compute this cell.

    Returns:
        y (b, t, hidden) and the state (b, n).
    """

    def looped(x: Tensor, state: Tensor, W: Tensor, U: Tensor, b: Tensor, c: Tensor) -> Values:
        Wx = functional.linear(x, W, b)
        h, last = nonlinear_scan(cell, Wx, (U, c), state=state, reset=reset, mode=mode)
        return h[..., : rnn.hidden_size], last

    weights = rnn()
    if fused and reset is None and leaves_graph(x, mode):
        return disable(run_torch_rnn)(rnn, cell, x, state, reset, mode)
    if not fused or reset is not None or mode != "auto" or not _served(x, state, *weights):
        return looped(x, state, *weights)
    kernels = _kernels(rnn)
    with without_autocast(x.device.type):
        if torch.is_grad_enabled() and _only_once(x):
            y, last = _Twice.apply(kernels, looped, wide(x), state, *weights)
        else:
            y, last = kernels(wide(x), state, *weights)
    return y.to(x.dtype), last


def _served(x: Tensor, state: Tensor, *weights: Tensor) -> bool:
    """Return whether torch's kernels take a call and give the dtypes of the loop."""
    return (
        x.numel() > 0
        and not handled()
        and all(weight.dtype == wide(x).dtype == state.dtype for weight in weights)
        and not torch.compiler.is_compiling()
        and not transforms_active()
    )


def _only_once(x: Tensor) -> bool:
    """Return whether the backward pass of the kernels has no derivative, as in cuDNN."""
    return x.is_cuda


def _kernels(rnn: RNNWeights) -> Run:
    """Return the functional form of a layer."""
    kernel: Any = {
        "RNN_TANH": torch.rnn_tanh,
        "RNN_RELU": torch.rnn_relu,
        "LSTM": torch.lstm,
        "GRU": torch.gru,
    }[rnn.mode]

    def run(x: Tensor, state: Tensor, *weights: Tensor) -> Values:
        # the kernels have an axis of layers
        parts = tuple(part[None].contiguous() for part in state.split(rnn.hidden_size, -1))
        # cuDNN has gradients in training mode alone; without dropout there is no other difference
        train = torch.is_grad_enabled()
        start = parts if rnn.mode == "LSTM" else parts[0]
        y, *last = kernel(x, start, weights, True, 1, 0.0, train, False, True)
        return y, torch.cat([part[0] for part in last], -1)

    return run


class _Twice(torch.autograd.Function):
    """Kernels whose backward pass has no derivative: where one is wanted, the loop takes their place."""

    @staticmethod
    def forward(ctx: Any, kernels: Run, looped: Run, *tensors: Tensor) -> Values:
        with torch.enable_grad():
            inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
            outputs = kernels(*inputs)
        ctx.looped, ctx.inputs, ctx.outputs = looped, inputs, outputs
        ctx.save_for_backward(*tensors)
        y, last = outputs
        return y.detach(), last.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        inputs, outputs = ctx.inputs, ctx.outputs
        twice = torch.is_grad_enabled()
        if twice:
            # aliases, since one of the tensors may depend on another
            inputs = [tensor.view_as(tensor) for tensor in ctx.saved_tensors]
            outputs = ctx.looped(*inputs)
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        found = iter(torch.autograd.grad(outputs, wanted, gradients, create_graph=twice, retain_graph=True))
        return None, None, *(next(found) if tensor.requires_grad else None for tensor in inputs)
