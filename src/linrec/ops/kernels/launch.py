"""How kernels are launched: on GPUs by Triton, where time is divided, and on CPUs by Numba, over lanes.

A lane is one batch row and a run of channels, which one thread walks through time.
"""

import contextlib
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linrec.ops.core.kernel import Memory, allocated
from linrec.ops.core.precision import wide

# on GPUs


@dataclass(frozen=True)
class Tiling:
    """How a recurrence is divided among programs; see `linrec.ops.kernels.elementwise.tiles`.

    Attributes:
        pieces: parts of a tile that follow each other in time, one a warp.
        rows: steps of a piece, which one thread scans.
        columns: channels of a tile, at least 32 (see `linrec.ops.kernels.elementwise.tiles.carried`).
        vector: neighbouring channels of one thread, as many as 32 threads need for all columns.
        group: tiles of a group.
        groups: groups of a supergroup.
        warps: warps of a program.
    """

    pieces: int
    rows: int
    columns: int
    vector: int
    group: int
    groups: int
    warps: int


def run_tiled(
    kernel: Any,
    tiling: Tiling,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    registers: int | None,
    *arguments: Any,
    scalars: tuple[int, ...] = (),
    **constants: Any,
) -> None:
    """Run `kernel(*arguments, words, time, chains, tiles, *scalars, **constants)` over all tiles.

    Args:
        kernel: a Triton kernel.
        tiling: the division.
        shape: (b, t, c) of the recurrence, without a zero.
        dtype: in which it is accumulated.
        device: where the tensors are.
        registers: most registers of a thread, so that more programs run at the same time: on NVIDIA's devices
            and in single precision, for which it is measured.
        arguments: the pointers.
        scalars: what follows the numbers of tiles.
        constants: the kernel's own constants.
    """
    import triton.language as tl

    batch, time, channels = shape
    double = dtype in (torch.float64, torch.complex128)
    chains = batch * -(-channels // tiling.columns)
    tiles = n_tiles(time, tiling)
    # links and inputs of tiles and of groups: 64 bits hold two float32 numbers
    planes = (2 if double else 1) * (2 if dtype.is_complex else 1)
    rows = tiles + (-(-tiles // tiling.group) if tiling.groups > 1 else 0)
    size = chains * rows * planes * tiling.columns if tiles > 1 else 0
    options = {} if registers is None or double or not torch.version.cuda else {"maxnreg": registers}
    words = torch.zeros(size, dtype=torch.int64, device=device)
    with on_device(device):
        kernel[(chains * tiles,)](
            *arguments, words, time, chains, tiles, *scalars,
            CHANNELS=channels, COMPLEX=dtype.is_complex, CHAINED=tiles > 1,
            EVEN=time % (tiling.pieces * tiling.rows) == 0 and channels % tiling.columns == 0,
            WIDE=tl.float64 if double else tl.float32, PIECES=tiling.pieces, ROWS=tiling.rows,
            COLUMNS=tiling.columns, VECTOR=tiling.vector, GROUP=tiling.group, GROUPS=tiling.groups,
            num_warps=tiling.warps, **options, **constants,
        )  # fmt: skip


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return what to launch a kernel within: Triton does on the current device, whatever the tensors' one."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def grouping(chains: int) -> tuple[int, int]:
    """Return tiles per group and groups per supergroup for this many chains of tiles: measured, on an H200.

    Many chains need no groups, because they advance side by side. The fewer there are, the more tiles of each
    run at the same time, and the longer a value would take from one to the next.
    """
    if chains >= 128:
        return 1, 1
    if chains >= 16:
        return 2, 2
    return (4, 2) if chains >= 4 else (8, 8)


def n_tiles(time: int, tiling: Tiling) -> int:
    """Return the number of tiles along `time` steps."""
    return -(-time // (tiling.pieces * tiling.rows))


def power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def real(tensor: Tensor) -> Tensor:
    """Return the tensor as kernels take it: complex64 as int64, complex128 as pairs of float64."""
    if tensor.dtype == torch.complex64:
        return tensor.resolve_conj().resolve_neg().view(torch.int64)
    if tensor.dtype == torch.complex128:
        return torch.view_as_real(tensor.resolve_conj().resolve_neg())
    return tensor.resolve_neg()


def pairs(tensor: Tensor) -> Tensor:
    """Return complex numbers as contiguous pairs of real ones."""
    return torch.view_as_real(tensor.resolve_conj().contiguous())


def mask(cut: Tensor | None, other: Tensor) -> Tensor:
    """Return the cut links as bytes; for None, another tensor, a pointer that the kernel never reads."""
    return real(other) if cut is None else cut.contiguous().view(torch.uint8)


# on CPUs

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


def lanes_of(x: Tensor) -> Lanes:
    """Return the lanes of an elementwise recurrence of x (b, t, c)."""
    (batch, _, channels), threads = x.shape, threads_for(x.numel())
    width = width_of(batch, channels, threads, NARROWEST // x.element_size())
    return divided(batch, channels, width, threads)


def width_of(rows: int, channels: int, threads: int, narrowest: int) -> int:
    """Return how many channels of rows a lane has: all, the fastest, if rows keep all threads busy."""
    if rows >= 4 * threads:
        return max(channels, 1)
    blocks = threads // math.gcd(rows, threads)
    # whole cache lines: two threads that write to the same one wait for each other
    return max(narrowest, 16 * math.ceil(channels / blocks / 16))


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
