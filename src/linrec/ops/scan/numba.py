"""The elementwise recurrence on the CPU by Numba, as custom operators that torch.compile leaves whole."""

import contextlib
import functools
import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from linrec.ops.scan import vmap
from linrec.ops.scan.dtypes import accumulation, promoted

SERIAL = 1 << 15
"""Below this many elements, waking a second thread takes longer than the work."""


@torch.library.custom_op("linrec::scan_numba", mutates_args=(), device_types="cpu")
def forward(
    a: Tensor, x: Tensor, state: Tensor | None, cut: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor]:
    """Return (y, last value); `a` has three axes of full size or 1, `cut` says where it is taken as zero."""
    dtype = promoted(a.dtype, x.dtype)
    y = x.new_empty(x.shape, dtype=accumulation(dtype))
    last = y.new_empty(x.shape[0], x.shape[2])
    with _threads(x.numel()) as threads:
        arrays = _array(a), _array(x), _cut(cut), _entering(state, last), _array(y), _array(last)
        _run("forward", arrays, x, _width(x, threads), reverse, threads)
    return y.to(dtype), last


@forward.register_fake
def _(a: Tensor, x: Tensor, state: Tensor | None, cut: Tensor | None, reverse: bool) -> tuple[Tensor, Tensor]:
    dtype = promoted(a.dtype, x.dtype)
    y = x.new_empty(x.shape, dtype=dtype)
    return y, y.new_empty(x.shape[0], x.shape[2], dtype=accumulation(dtype))


@torch.library.custom_op("linrec::scan_numba_backward", mutates_args=(), device_types="cpu")
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
    dx = y.new_empty(y.shape, dtype=accumulation(y.dtype))
    dstate = dx.new_empty(y.shape[0], y.shape[2])
    with _threads(y.numel()) as threads:
        width = _width(y, threads)
        da = dx.new_zeros(_partial_sums(a, y, width) if needs_a else (0, 0, 0))
        given = _array(a), _array(y), _cut(cut), _entering(state, dstate), _array(dy), _array(dlast)
        _run("backward", (*given, _array(da), _array(dx), _array(dstate)), y, width, reverse, threads)
    return da.sum_to_size(a.shape) if needs_a else da, dx, dstate


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
    dx = y.new_empty(y.shape, dtype=accumulation(y.dtype))
    return dx.new_empty(a.shape if needs_a else (0, 0, 0)), dx, dx.new_empty(y.shape[0], y.shape[2])


@functools.cache
def _kernels() -> ModuleType:
    from linrec.ops.scan import numba_kernels

    return numba_kernels


def _run(name: str, arrays: tuple[Any, ...], x: Tensor, width: int, reverse: bool, threads: int) -> None:
    lanes = x.shape[0] * math.ceil(x.shape[2] / width)
    if threads == 1:
        getattr(_kernels(), name)(*arrays, width, reverse, 0, lanes)
    else:
        getattr(_kernels(), f"{name}_parallel")(*arrays, width, reverse, lanes)


@contextlib.contextmanager
def _threads(elements: int) -> Iterator[int]:
    """Let Numba use as many threads as torch does, and tell how many."""
    import numba

    threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
    # one thread needs no pool, and a data loader's forked worker, which has one, must not touch its parent's
    if threads == 1 or elements < SERIAL:
        yield 1
        return
    before = numba.get_num_threads()
    numba.set_num_threads(threads)
    try:
        yield threads
    finally:
        numba.set_num_threads(before)


def _width(x: Tensor, threads: int) -> int:
    """Channels of one lane: whole rows where they keep all threads busy, as they are read fastest."""
    batch, _, channels = x.shape
    if batch >= 4 * threads:
        return max(channels, 1)
    blocks = threads // math.gcd(batch, threads)
    # whole cache lines, or two threads would write to the same one
    return max(16, 16 * math.ceil(channels / blocks / 16))


def _partial_sums(a: Tensor, y: Tensor, width: int) -> tuple[int, int, int]:
    batch, time, channels = y.shape
    steps = time if a.shape[1] > 1 else math.ceil(time / _kernels().SPAN)
    return batch, steps, channels if a.shape[2] > 1 else math.ceil(channels / width)


def _array(tensor: Tensor) -> Any:
    """The tensor as a contiguous array in the accumulation dtype; a copy only where that needs one."""
    wide = tensor.to(accumulation(tensor.dtype))
    return wide.resolve_conj().resolve_neg().contiguous().numpy()


def _cut(cut: Tensor | None) -> Any:
    return (torch.empty(0, 0, dtype=torch.bool, device="cpu") if cut is None else cut.contiguous()).numpy()


def _entering(state: Tensor | None, like: Tensor) -> Any:
    return _array(torch.zeros_like(like) if state is None else state)


vmap.register(forward, backward)
