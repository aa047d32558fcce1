"""How the GPU kernels of elementwise recurrences are launched: the division of time, and memory for it."""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


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


def launch(
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
