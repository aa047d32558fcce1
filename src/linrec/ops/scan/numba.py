"""The elementwise recurrence on the CPU by Numba, as operators that torch.compile leaves whole."""

import functools
import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from linrec.ops import lanes
from linrec.ops.operators import operator
from linrec.ops.scan import vmap
from linrec.ops.scan.dtypes import accumulation, promoted


@operator("scan_numba")
def forward(
    a: Tensor, x: Tensor, state: Tensor | None, cut: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor]:
    """Return (y, last value); `a` has three axes of full size or 1, `cut` says where it is taken as zero."""
    dtype = promoted(a.dtype, x.dtype)
    y = lanes.empty(x.shape, accumulation(dtype))
    last = torch.from_numpy(_entering(state, y).copy())
    with lanes.threads_for(x.numel()) as threads:
        width = lanes.width_of(x, threads)
        arrays = _array(a), _array(x), lanes.cut_array(cut), last.numpy(), y.numpy()
        lanes.run(_kernels(), "forward", (*arrays, width, reverse), lanes.count(x, width), threads)
    return y.to(dtype), last


@torch.library.register_fake(forward)
def _(a: Tensor, x: Tensor, state: Tensor | None, cut: Tensor | None, reverse: bool) -> tuple[Tensor, Tensor]:
    dtype = promoted(a.dtype, x.dtype)
    y = x.new_empty(x.shape, dtype=dtype)
    return y, y.new_empty(x.shape[0], x.shape[2], dtype=accumulation(dtype))


@operator("scan_numba_backward")
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
    """Return the gradients of a (empty unless needed), x and the state, in the accumulation dtype."""
    dx = lanes.empty(y.shape, accumulation(y.dtype))
    dstate = torch.from_numpy(_array(dlast).copy())
    with lanes.threads_for(y.numel()) as threads:
        width = lanes.width_of(y, threads)
        da = lanes.empty(_partial_sums(a, y, width) if needs_a else (0, 0, 0), dx.dtype)
        # what the kernel adds up, it does not write first
        if 1 in a.shape[1:]:
            da.zero_()
        given = _array(a), _array(y), lanes.cut_array(cut), _entering(state, dx)[:, None], _array(dy)
        arguments = (*given, da.numpy(), dx.numpy(), dstate.numpy(), width, reverse)
        lanes.run(_kernels(), "backward", arguments, lanes.count(y, width), threads)
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
    dx = y.new_empty(y.shape, dtype=accumulation(y.dtype))
    return dx.new_empty(a.shape if needs_a else (0, 0, 0)), dx, dx.new_empty(y.shape[0], y.shape[2])


@functools.cache
def _kernels() -> ModuleType:
    from linrec.ops.scan import numba_kernels

    return numba_kernels


def _partial_sums(a: Tensor, y: Tensor, width: int) -> tuple[int, int, int]:
    batch, time, channels = y.shape
    steps = time if a.shape[1] > 1 else math.ceil(time / _kernels().SPAN)
    return batch, steps, channels if a.shape[2] > 1 else math.ceil(channels / width)


def _array(tensor: Tensor) -> Any:
    return lanes.array(tensor.to(accumulation(tensor.dtype)))


def _entering(state: Tensor | None, like: Tensor) -> Any:
    return _array(like.new_zeros(like.shape[0], like.shape[2]) if state is None else state)


vmap.register(forward, backward)
