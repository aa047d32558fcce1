"""The elementwise recurrence on GPUs by Triton, as operators that torch.compile leaves whole."""

import functools
from types import ModuleType

import torch
from torch import Tensor

from linrec.ops.operators import operator
from linrec.ops.scan import vmap
from linrec.ops.scan.dtypes import accumulation, promoted
from linrec.ops.triton_launch import Tiling, grouping, launch, n_tiles, power_of_2, real


@operator("scan_triton")
def forward(
    a: Tensor, x: Tensor, state: Tensor | None, cut: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor]:
    """Return (y, last value); `a` has three axes of full size or 1, `cut` says where it is taken as zero."""
    dtype = promoted(a.dtype, x.dtype)
    y, last = _outputs(x, dtype)
    if y.numel() == 0:
        return y, last
    a, x = _read(a, dtype).expand(x.shape), _read(x, dtype)
    launch(
        _kernels().forward,
        tiling(y),
        y.shape,
        last.dtype,
        y.device,
        168 if y.element_size() <= 4 else None,
        real(a),
        real(x),
        real(last if state is None else state.contiguous()),
        real(y) if cut is None else cut.contiguous().view(torch.uint8),
        real(y),
        real(last),
        scalars=(a.stride(0), x.stride(0)),
        A_STEP=a.stride(1),
        A_CHANNEL=a.stride(2),
        X_STEP=x.stride(1),
        X_CHANNEL=x.stride(2),
        UNIT=_unit(dtype),
        REVERSE=reverse,
        HAS_STATE=state is not None,
        HAS_CUT=cut is not None,
        AGAIN=_again(y),
    )
    return y, last


@torch.library.register_fake(forward)
def _(a: Tensor, x: Tensor, state: Tensor | None, cut: Tensor | None, reverse: bool) -> tuple[Tensor, Tensor]:
    return _outputs(x, promoted(a.dtype, x.dtype))


@operator("scan_triton_backward")
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
    plan = tiling(y)
    da = y.new_empty(0)
    if needs_a:
        shape = (batch, n_tiles(time, plan) if summed else time, channels)
        da = y.new_empty(shape, dtype=_of_a(a, y))
    if y.numel() > 0:
        a_wide, dy = _read(a, y.dtype).expand(y.shape), dy.to(y.dtype)
        launch(
            _kernels().backward,
            plan,
            y.shape,
            dstate.dtype,
            y.device,
            None,
            real(a_wide),
            real(y.contiguous()),
            real(dstate if state is None else state.contiguous()),
            real(y) if cut is None else cut.contiguous().view(torch.uint8),
            real(dy),
            real(dlast.contiguous()),
            real(da),
            real(dx),
            real(dstate),
            scalars=(a_wide.stride(0), dy.stride(0)),
            A_STEP=a_wide.stride(1),
            A_CHANNEL=a_wide.stride(2),
            DY_STEP=dy.stride(1),
            DY_CHANNEL=dy.stride(2),
            UNIT=_unit(y.dtype),
            REVERSE=reverse,
            HAS_STATE=state is not None,
            HAS_CUT=cut is not None,
            NEEDS_A=needs_a,
            SUMMED=summed,
            AGAIN=_again(y),
        )
    return da.sum_to_size(a.shape) if needs_a else da, dx, dstate


@torch.library.register_fake(backward)
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
    return y.new_empty(a.shape, dtype=_of_a(a, y)) if needs_a else y.new_empty(0), dx, dstate


@functools.cache
def _kernels() -> ModuleType:
    from linrec.ops.scan import triton_kernels

    return triton_kernels


def _outputs(like: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    batch, time, channels = like.shape
    steps = torch.empty(batch, time, channels, dtype=dtype, device=like.device)
    return steps, steps.new_empty(batch, channels, dtype=accumulation(dtype))


def _read(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what kernels read: real numbers in any precision, but complex ones where y is complex."""
    return tensor.to(dtype) if dtype.is_complex else tensor


def _of_a(a: Tensor, y: Tensor) -> torch.dtype:
    """Return the dtype of da, complex where y is."""
    # gradients that are still to be summed keep all their digits
    return torch.promote_types(a.dtype, y.dtype) if a.shape == y.shape else accumulation(y.dtype)


def _unit(dtype: torch.dtype) -> int:
    # complex128 numbers are pairs for the kernels
    return 2 if dtype == torch.complex128 else 1


def _again(y: Tensor) -> bool:
    """Return whether inputs are loaded a second time, from a cache, rather than kept until the value comes.

    That doubles the tiles which run at the same time: good for one long sequence, whose tiles spend most of
    their time waiting, and for 16-bit inputs, which leave the cache bandwidth for it. Measured, on an H200.
    """
    batch, _, channels = y.shape
    return y.element_size() == 2 and batch * -(-channels // 64) < 4


def tiling(y: Tensor) -> Tiling:
    """Return the division of time for a recurrence with outputs like y (b, t, c): measured, on an H200."""
    batch, time, channels = y.shape
    size = y.element_size()
    columns = 64 if size < 16 and channels > 32 else 32
    rows = min({2: 32, 4: 32, 8: 16, 16: 8}[size], power_of_2(time))
    pieces = min(4, power_of_2(-(-time // rows)))
    groups = grouping(batch * -(-channels // columns))
    return Tiling(pieces, rows, columns, columns // 32, *groups, warps=pieces)


vmap.register(forward, backward)
