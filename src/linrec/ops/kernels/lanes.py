"""How the CPU kernels are compiled and called: lanes spread over threads, tensors as arrays.

A lane is one batch row and a run of channels, which one thread walks through time.
"""

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from linrec.ops.core.kernel import Memory, allocated
from linrec.ops.core.precision import wide

SERIAL = 1 << 15
"""Below this many elements, waking a second thread takes longer than the work."""

NARROWEST = 256
"""Bytes of a lane's row, at least: shorter pieces come so slowly from memory that one thread alone, on whole
rows, is faster than two."""


def run(kernels: Any, name: str, arguments: Sequence[Any], lanes: int, threads: int) -> None:
    """Call the kernel `name` on all lanes, on one thread or on several."""
    if threads == 1 or lanes == 1:
        getattr(kernels, name)(*arguments, 0, lanes)
    else:
        getattr(kernels, f"{name}_parallel")(*arguments, lanes)


@contextlib.contextmanager
def threads_for(elements: int) -> Iterator[int]:
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


def width_of(x: Tensor, threads: int) -> int:
    """Return how many channels of x (b, t, c) a lane has: all, the fastest, if rows keep all threads busy."""
    batch, _, channels = x.shape
    if batch >= 4 * threads:
        return max(channels, 1)
    blocks = threads // math.gcd(batch, threads)
    # whole cache lines: two threads that write to the same one wait for each other
    return max(NARROWEST // x.element_size(), 16 * math.ceil(channels / blocks / 16))


def count(x: Tensor, width: int) -> int:
    """Return the number of lanes of x (b, t, c)."""
    return x.shape[0] * math.ceil(x.shape[2] / width)


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return memory on the CPU, not yet written."""
    return allocated(Memory(shape, dtype), torch.device("cpu"))


def array(tensor: Tensor) -> Any:
    """Return the tensor as a contiguous array in the accumulation dtype, a copy only where that needs one."""
    tensor = wide(tensor)
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous().numpy()


def cut_array(cut: Tensor | None) -> Any:
    """Return where links are cut (b, t), or an empty array for nowhere."""
    return nothing(2, torch.bool) if cut is None else array(cut)


@functools.cache
def nothing(axes: int, dtype: torch.dtype) -> Any:
    """Return an empty array, for a tensor that is not there."""
    return torch.empty((0,) * axes, dtype=dtype, device="cpu").numpy()


def lane_kernel(**options: Any) -> Any:
    """Return Numba's decorator for functions that walk a lane."""
    import numba

    # fused multiply-add is allowed, reordering sums and ignoring NaN is not
    return numba.njit(
        **{"cache": True, "fastmath": {"contract"}, "pipeline_class": _distinct_arrays()} | options
    )


@functools.cache
def _distinct_arrays() -> Any:
    """Return Numba's compiler, told that no array that a function writes overlaps another of its arguments.

    Otherwise each loop over channels first asks that of every pair of arrays, and is not made of vector
    instructions where the loop around it runs backwards.
    """
    from numba.core.compiler import CompilerBase, DefaultPassBuilder

    class DistinctArrays(CompilerBase):
        def define_pipelines(self):  # type: ignore[no-untyped-def]
            self.state.flags.noalias = True
            return [DefaultPassBuilder.define_nopython_pipeline(self.state)]

    return DistinctArrays
