"""How the CPU kernels are called: lanes spread over threads, tensors as arrays, memory for what they return.

A lane is one batch row and a run of channels, which one thread walks through time.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

SERIAL = 1 << 15
"""Below this many elements, waking a second thread takes longer than the work."""

NARROWEST = 256
"""Bytes of a lane's row, at least: shorter pieces come so slowly from memory that one thread alone, on whole
rows, is faster than two."""

_LINE = 64
# bytes of an array from which on NumPy asks for huge pages
_HUGE = 1 << 22


def run(kernels: ModuleType, name: str, arguments: Sequence[Any], lanes: int, threads: int) -> None:
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
    """Return memory for an output, not yet written, from the start of a cache line.

    Memory that is new to the process is mapped page by page as it is written, which takes three times longer
    than the writing. For large arrays NumPy asks for huge pages, which torch does not.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < _HUGE:
        return torch.empty(shape, dtype=dtype, device="cpu")
    memory = np.empty(size + _LINE, dtype=np.uint8)
    first = -memory.ctypes.data % _LINE
    return torch.from_numpy(memory[first : first + size]).view(dtype).view(*shape)


def array(tensor: Tensor) -> Any:
    """Return the tensor as a contiguous array, a copy only where that needs one."""
    return tensor.resolve_conj().resolve_neg().contiguous().numpy()


def cut_array(cut: Tensor | None) -> Any:
    """Return where links are cut (b, t), or an empty array for nowhere."""
    return array(torch.empty(0, 0, dtype=torch.bool, device="cpu") if cut is None else cut)
