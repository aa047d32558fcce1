"""The elementwise recurrence on GPUs by Triton, as custom operators that torch.compile leaves whole."""

import contextlib
import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from linrec.ops.scan import vmap
from linrec.ops.scan.dtypes import accumulation, promoted

ROWS = 64
"""Steps of one tile, at most."""

COLUMNS = 32
"""Channels of one program, at most."""


@torch.library.custom_op("linrec::scan_triton", mutates_args=())
def forward(
    a: Tensor, x: Tensor, state: Tensor | None, cut: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor]:
    """Return (y, last value); `a` has three axes of full size or 1, `cut` says where it is taken as zero."""
    _, time, channels = x.shape
    dtype = promoted(a.dtype, x.dtype)
    y, last = _outputs(x, dtype)
    a_real, x_real = _real(a.to(dtype).expand(x.shape)), _real(x.to(dtype))
    _launch(
        "forward",
        y,
        a_real,
        x_real,
        _real(last if state is None else state.contiguous()),
        x_real if cut is None else cut.contiguous().view(torch.uint8),
        _real(y),
        _real(last),
        time,
        channels,
        *a_real.stride()[:3],
        *x_real.stride()[:3],
        REVERSE=reverse,
        COMPLEX=dtype.is_complex,
        HAS_STATE=state is not None,
        HAS_CUT=cut is not None,
    )
    return y, last


@forward.register_fake
def _(a: Tensor, x: Tensor, state: Tensor | None, cut: Tensor | None, reverse: bool) -> tuple[Tensor, Tensor]:
    return _outputs(x, promoted(a.dtype, x.dtype))


@torch.library.custom_op("linrec::scan_triton_backward", mutates_args=())
def backward(
    a: Tensor,
    y: Tensor,
    state: Tensor | None,
    cut: Tensor | None,
    dy: Tensor,
    dlast: Tensor,
    reverse: bool,
    needs_a: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of a (empty unless needed), x and the state, real only where y is."""
    batch, time, channels = y.shape
    dx, dstate = _outputs(y, y.dtype)
    summed = a.shape[1] < time or time == 1
    whole = a.shape == y.shape
    da = y.new_empty(0)
    if needs_a:
        # what is still to be summed keeps all its digits until then
        shape = (batch, 1 if summed else time, channels)
        da = y.new_empty(shape, dtype=y.dtype if whole else accumulation(y.dtype))
    a_real, y_real, dy_real = _real(a.to(y.dtype).expand(y.shape)), _real(y), _real(dy.to(y.dtype))
    _launch(
        "backward",
        y,
        a_real,
        y_real,
        _real(dstate if state is None else state.contiguous()),
        y_real if cut is None else cut.contiguous().view(torch.uint8),
        dy_real,
        _real(dlast.contiguous()),
        _real(da),
        _real(dx),
        _real(dstate),
        time,
        channels,
        *a_real.stride()[:3],
        *y_real.stride()[:3],
        *dy_real.stride()[:3],
        REVERSE=reverse,
        COMPLEX=y.is_complex(),
        HAS_STATE=state is not None,
        HAS_CUT=cut is not None,
        NEEDS_A=needs_a,
        SUMMED=summed,
    )
    return da if not needs_a or whole else da.sum_to_size(a.shape), dx, dstate


@backward.register_fake
def _(
    a: Tensor,
    y: Tensor,
    state: Tensor | None,
    cut: Tensor | None,
    dy: Tensor,
    dlast: Tensor,
    reverse: bool,
    needs_a: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dstate = _outputs(y, y.dtype)
    wide = y.dtype if a.shape == y.shape else accumulation(y.dtype)
    return y.new_empty(a.shape, dtype=wide) if needs_a else y.new_empty(0), dx, dstate


@functools.cache
def _kernels() -> ModuleType:
    from linrec.ops.scan import triton_kernels

    return triton_kernels


def _outputs(like: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    batch, time, channels = like.shape
    steps = torch.empty(batch, time, channels, dtype=dtype, device=like.device)
    return steps, steps.new_empty(batch, channels, dtype=accumulation(dtype))


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.resolve_neg()


def _launch(name: str, y: Tensor, *arguments: Any, **constants: Any) -> None:
    import triton
    import triton.language as tl

    batch, time, channels = y.shape
    if y.numel() == 0:
        return
    wide = tl.float64 if accumulation(y.dtype) in (torch.float64, torch.complex128) else tl.float32
    rows = min(ROWS, max(16, triton.next_power_of_2(time)))
    columns = min(COLUMNS, triton.next_power_of_2(channels))
    grid = (batch * triton.cdiv(channels, columns),)
    # Triton launches on the current device, whatever the tensors' one
    with torch.cuda.device(y.device) if y.is_cuda else contextlib.nullcontext():
        getattr(_kernels(), name)[grid](*arguments, **constants, WIDE=wide, ROWS=rows, COLUMNS=columns)


vmap.register(forward, backward)
