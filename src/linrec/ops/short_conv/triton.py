"""The convolution on GPUs by Triton: each input is read once, in its own dtype."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from linrec.ops.core.kernel import Gradients, Memory, Space, add_up, allocated, by_autograd, kernel_op, like
from linrec.ops.kernels.launch import Kernels, mask, on_device, power_of_2, row_stride
from linrec.ops.short_conv.torch import ShortConv, filtered, last_inputs

KERNELS = Kernels("elementwise.short_conv_triton")
MOST_TAPS = 8
"""The kernels unroll their loops over taps."""

COLUMNS = 64
"""Channels of a program."""
ROWS = 32
"""Steps of a program of the forward kernel."""
PART, PARTS = 16, 16
"""Steps of a part of a program of the backward kernel, and parts; the first part holds the state's steps."""


class Inputs(NamedTuple):
    """Inputs of the kernel.

    Attributes:
        x: (b, t, c).
        weight: (1 or b, width, c).
        bias: None or (1 or b, 1, c).
        state: (b, width - 1, c).
        reset: None or (b, t) bool.
        silu: whether SiLU follows.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    state: Tensor
    reset: Tensor | None
    silu: bool


class Outputs(NamedTuple):
    """Output of the kernel: y (b, t, c)."""

    y: Tensor


def convolution(given: ShortConv) -> tuple[Tensor, Tensor]:
    """Compute y = f(sum_j w_j (x shifted by j) + b) in one kernel."""
    x, weight, bias, state, reset, silu = given
    # with a batch axis, into which vmap folds its axis, and neighbouring channels side by side
    of_channels = None if bias is None else bias[None, None]
    (y,) = kernel(Inputs(x, weight.mT[None], of_channels, state, reset, silu))
    recent = x[:, max(0, x.shape[1] - state.shape[1]) :]
    return y, last_inputs(torch.cat([state, recent.to(state.dtype)], dim=1), state, reset)


def _forward(out: Outputs, given: Inputs) -> None:
    _filter(given, out.y, dy=None)


def _filter(given: Inputs, out: Tensor, dy: Tensor | None) -> None:
    """Fill `out` with y or, given the gradient of y, with the gradient of the argument of SiLU."""
    x, weight, bias, state, reset, silu = given
    x, weight = _rows(x), weight.contiguous()
    constant = weight if bias is None else bias.contiguous()
    gradient = x if dy is None else dy
    _launch(
        KERNELS.short_conv, x, -(-x.shape[1] // ROWS),
        (x, weight, constant, state.contiguous(), mask(reset, x), gradient, out),
        (x.stride()[:2], gradient.stride()[:2], row_stride(weight), row_stride(constant)),
        WIDTH=weight.shape[1], HAS_BIAS=bias is not None, HAS_RESET=reset is not None, ROWS=ROWS,
        SILU=silu, DERIVATIVE=dy is not None,
    )  # fmt: skip


def _adjoint(out: Gradients, given: Inputs, kept: Outputs, d: Outputs) -> None:
    x, weight, _, state, reset, silu = given
    x, weight, dy = _rows(x), weight.contiguous(), _rows(d.y)
    if silu:
        # what SiLU was applied to is computed again
        dz = torch.empty_like(x, memory_format=torch.contiguous_format)
        _filter(given, dz, dy)
        dy = dz
    (batch, time, channels), width = x.shape, weight.shape[1]
    # sums over the steps of a tile are reduced once
    parts = -(-(time + width - 1) // PART)
    of_tile = min(PARTS, power_of_2(parts))
    tiles = -(-parts // of_tile)
    shapes = (batch, tiles, width, channels), (batch, tiles, channels)
    of_taps, of_bias = (allocated(Memory(shape, state.dtype), x.device) for shape in shapes)
    _launch(
        KERNELS.short_conv_gradients, x, tiles,
        (x, weight, state.contiguous(), mask(reset, x), dy, out.x, of_taps, of_bias, out.state),
        (x.stride()[:2], dy.stride()[:2], row_stride(weight)),
        WIDTH=width, HAS_RESET=reset is not None, ROWS=PART, PARTS=of_tile,
    )  # fmt: skip
    add_up((out.weight[:, None], out.bias), (of_taps, of_bias))


def _launch(
    run: Any, x: Tensor, tiles: int, tensors: tuple[Tensor, ...], scalars: tuple[Any, ...], **options: Any
) -> None:
    """Run a kernel for all batch rows, tiles of steps, and blocks of channels."""
    import triton.language as tl

    batch, time, channels = x.shape
    programs = batch * tiles * -(-channels // COLUMNS)
    if programs:
        with on_device(x.device):
            run[(programs,)](
                *tensors, time, tiles, *scalars, CHANNELS=channels, COLUMNS=COLUMNS, num_warps=4,
                WIDE=tl.float64 if x.dtype == torch.float64 else tl.float32, **options,
            )  # fmt: skip


def _rows(x: Tensor) -> Tensor:
    """Return the tensor (b, t, c), copied unless its channels are adjacent; steps need not be."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _twin(given: Inputs) -> tuple[Tensor]:
    """Return y in torch operations, for double backward."""
    x, weight, bias, state, reset, silu = given
    inputs = torch.cat([state, x], dim=1)
    return (filtered(x, inputs, weight.mT[:, None], bias, reset, silu).to(x.dtype),)


def _memory(given: Inputs, keep: bool) -> tuple[Space]:
    return (like(given.x),)


kernel = kernel_op(
    "short_conv_triton", Inputs, Outputs, _memory, _forward, _adjoint, again=by_autograd(_twin), batch="x"
)
