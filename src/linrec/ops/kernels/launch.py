"""Launching kernels: on GPUs by Triton, with time divided into tiles, and on CPUs by Numba, over lanes.

A lane is a batch row and a range of channels; a single thread processes it over time.
"""

import contextlib
import functools
import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linrec.ops.core.kernel import Memory, allocated
from linrec.ops.core.precision import wide


class Kernels:
    """A module of kernels, imported at the first use of a kernel.

    Args:
        name: the module's name within this package, such as "elementwise.scan_triton".
    """

    def __init__(self, name: str) -> None:
        self._name = f"linrec.ops.kernels.{name}"

    @functools.cached_property
    def _module(self) -> ModuleType:
        return importlib.import_module(self._name)

    def __getattr__(self, kernel: str) -> Any:
        return getattr(self._module, kernel)


# GPUs


@dataclass(frozen=True)
class Tiling:
    """Division of a recurrence among programs; see `linrec.ops.kernels.elementwise.tiles`.

    Attributes:
        pieces: number of consecutive segments of a tile, one per warp.
        rows: number of steps per segment; a single thread scans them.
        columns: channels per tile, at least 32; see `linrec.ops.kernels.elementwise.tiles.carried`.
        vector: number of consecutive channels per thread; 32 threads cover all columns.
        group: number of tiles per group.
        groups: number of groups per supergroup.
        warps: number of warps per program.
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
        shape: (b, t, c) of the recurrence; no size may be zero.
        dtype: accumulation dtype.
        device: device of the tensors.
        registers: limit of registers per thread, so that more programs run concurrently. It was tuned for
            NVIDIA devices in single precision, and is used only there.
        arguments: the pointers.
        scalars: further scalar arguments, after the number of tiles.
        constants: constants specific to the kernel.
    """
    import triton.language as tl

    batch, time, channels = shape
    double = dtype in (torch.float64, torch.complex128)
    chains = batch * -(-channels // tiling.columns)
    tiles = n_tiles(time, tiling)
    # words hold links and inputs of tiles and groups: a 64-bit word holds two float32 numbers
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
    """Return a context that makes `device` current, because Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def grouping(chains: int) -> tuple[int, int]:
    """Return tiles per group and groups per supergroup for this number of chains of tiles, tuned on an H200.

    Many chains need no groups, because they run in parallel. With fewer chains, more tiles of each chain run
    concurrently, and passing a value from tile to tile would take longer.
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
    """Return the smallest power of two >= n."""
    return 1 << (n - 1).bit_length()


def real(tensor: Tensor) -> Tensor:
    """Return the tensor in the form for kernels: complex64 as int64, complex128 as pairs of float64."""
    if tensor.dtype == torch.complex64:
        return tensor.resolve_conj().resolve_neg().view(torch.int64)
    if tensor.dtype == torch.complex128:
        return torch.view_as_real(tensor.resolve_conj().resolve_neg())
    return tensor.resolve_neg()


def pairs(tensor: Tensor) -> Tensor:
    """Return complex numbers as contiguous pairs of real numbers."""
    return torch.view_as_real(tensor.resolve_conj().contiguous())


def row_stride(x: Tensor) -> int:
    """Return the stride between the batch rows of a contiguous tensor: 0 if all rows share its only row."""
    return x[0].numel() if len(x) > 1 else 0


def mask(cut: Tensor | None, other: Tensor) -> Tensor:
    """Return the resets as bytes; for None, another tensor as a pointer that the kernel never reads."""
    return real(other) if cut is None else cut.contiguous().view(torch.uint8)


# CPUs

SERIAL = 1 << 15
"""Below this number of elements, waking a second thread takes longer than the work itself."""

NARROWEST = 256
"""Smallest number of bytes per row of a lane: with less, reads from memory are so slow that a single thread
on whole rows is faster than two threads."""


class Lanes(NamedTuple):
    """Division of work into lanes.

    Attributes:
        rows: number of batch rows, times heads if lanes do not span heads.
        blocks: number of lanes per row.
        width: number of channels per lane.
        threads: number of threads.
    """

    rows: int
    blocks: int
    width: int
    threads: int

    def run(self, kernels: Any, name: str, *arguments: Any) -> None:
        """Call the kernel `name` on all lanes, on the calling thread or on several Numba threads."""
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
    """Return the number of threads to use: torch's number of threads, or 1 if there is little work."""
    import numba

    # a single thread needs no thread pool; data-loader workers, which are forked, must not touch the pool
    return 1 if elements < SERIAL else min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)


def divided(rows: int, channels: int, width: int, threads: int) -> Lanes:
    """Return the division of rows of `channels` channels into lanes of `width` channels."""
    return Lanes(rows, math.ceil(channels / width), width, threads)


def lanes_of(x: Tensor) -> Lanes:
    """Return the division of an elementwise recurrence of x (b, t, c) into lanes."""
    (batch, _, channels), threads = x.shape, threads_for(x.numel())
    width = width_of(batch, channels, threads, NARROWEST // x.element_size())
    return divided(batch, channels, width, threads)


def width_of(rows: int, channels: int, threads: int, narrowest: int) -> int:
    """Return the number of channels per lane: all, which is fastest, if the rows occupy all threads."""
    if rows >= 4 * threads:
        return max(channels, 1)
    blocks = threads // math.gcd(rows, threads)
    # whole cache lines, because threads that write to the same line wait for each other
    return max(narrowest, 16 * math.ceil(channels / blocks / 16))


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return uninitialised memory on the CPU."""
    return allocated(Memory(shape, dtype), torch.device("cpu"))


def array(tensor: Tensor) -> Any:
    """Return the tensor as a contiguous array in the accumulation dtype, copied only if necessary."""
    tensor = wide(tensor)
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous().numpy()


def cut_array(cut: Tensor | None) -> Any:
    """Return the resets (b, t) as an array, which is empty for None."""
    return nothing(2, torch.bool) if cut is None else array(cut)


@functools.cache
def nothing(axes: int, dtype: torch.dtype) -> Any:
    """Return an empty array in place of a missing tensor."""
    return torch.empty((0,) * axes, dtype=dtype, device="cpu").numpy()


def lane_kernel(**options: Any) -> Any:
    """Return Numba's decorator for functions that process a lane."""
    import numba

    # fused multiply-add is allowed; reordering sums and ignoring NaN are not
    return numba.njit(
        **{"cache": True, "fastmath": {"contract"}, "pipeline_class": _distinct_arrays()} | options
    )


@functools.cache
def _distinct_arrays() -> Any:
    """Return a Numba compiler that assumes that written arrays do not overlap other arguments.

    Otherwise every loop over channels first checks each pair of arrays for overlap, and is not vectorised if
    the loop around it runs backwards.
    """
    from numba.core.compiler import CompilerBase, DefaultPassBuilder

    class DistinctArrays(CompilerBase):
        def define_pipelines(self):  # type: ignore[no-untyped-def]
            self.state.flags.noalias = True
            return [DefaultPassBuilder.define_nopython_pipeline(self.state)]

    return DistinctArrays
