"""How the CPU kernels are compiled and called: lanes spread over threads, tensors as arrays.

A lane is one batch row and a run of channels, which one thread walks through time.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linrec.ops.core.kernel import Memory, allocated
from linrec.ops.core.precision import wide

SERIAL = 1 << 15
"""Below this many elements, waking a second thread takes longer than the work."""

NARROWEST = 256
"""Bytes of a lane's row, at least: shorter pieces come so slowly from memory that one thread alone, on whole
rows, is faster than two."""


class Lanes(NamedTuple):
    """Work divided into lanes.

    Attributes:
        rows: rows of the batch, and heads of them where each is apart.
        blocks: lanes of a row.
        width: channels of a lane.
        threads: threads that walk the lanes.
    """

    rows: int
    blocks: int
    width: int
    threads: int

    def run(self, kernels: Any, name: str, *arguments: Any) -> None:
        """Call the kernel `name` on all lanes, on one thread or on several of Numba's."""
        lanes = self.rows * self.blocks
        if self.threads == 1 or lanes == 1:
            getattr(kernels, name)(*arguments, 0, lanes)
            return
        import numba

        before = numba.get_num_threads()
        numba.set_num_threads(self.threads)
        try:
            getattr(kernels, f"{name}_parallel")(*arguments, lanes)
        finally:
            numba.set_num_threads(before)


def threads_for(elements: int) -> int:
    """Return how many threads share the work: as many as torch has, or one if there is little."""
    import numba

    # one thread needs no pool, and a data loader's forked worker, which has one, must not touch its parent's
    return 1 if elements < SERIAL else min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)


def divided(rows: int, channels: int, width: int, threads: int) -> Lanes:
    """Return the lanes of `width` channels in rows of `channels`."""
    return Lanes(rows, math.ceil(channels / width), width, threads)


def over(x: Tensor) -> Lanes:
    """Return the lanes of an elementwise recurrence of x (b, t, c)."""
    threads = threads_for(x.numel())
    return divided(x.shape[0], x.shape[2], width_of(x, threads), threads)


def width_of(x: Tensor, threads: int) -> int:
    """Return how many channels of x (b, t, c) a lane has: all, the fastest, if rows keep all threads busy."""
    batch, _, channels = x.shape
    if batch >= 4 * threads:
        return max(channels, 1)
    blocks = threads // math.gcd(batch, threads)
    # whole cache lines: two threads that write to the same one wait for each other
    return max(NARROWEST // x.element_size(), 16 * math.ceil(channels / blocks / 16))


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
