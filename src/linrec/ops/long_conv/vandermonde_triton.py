"""Sums over powers on GPUs by Triton, as operators that torch.compile leaves whole."""

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from linrec.ops.kernels.launch import power_of_2
from linrec.ops.long_conv.triton import on_device, pairs
from linrec.ops.operators import operator
from linrec.ops.precision import real_dtype

# rows, columns and entries of the tiles that a program multiplies
TILE = 64
# the least that a tensor core takes
LEAST = 16


@operator("vandermonde_triton")
def forward(weight: Tensor, near: Tensor, far: Tensor, length: int) -> Tensor:
    """Return S (k, d, length) of weights (k, d, n), near (d, n, c) and far (d, n, m), all complex."""
    sums = _sums(weight, length)
    k, d, n = weight.shape
    c, m = near.shape[-1], far.shape[-1]
    tiles = _tiles(sums)
    tiles["ENTRIES"] = min(max(power_of_2(n), LEAST), tiles["ENTRIES"])
    grid = d, k * -(-m // tiles["ROWS"]), -(-c // tiles["COLUMNS"])
    with on_device(weight):
        _kernels().forward[grid](pairs(weight), _parts(near), _parts(far), sums, d, n, c, m, length, **tiles)
    return sums


@torch.library.register_fake(forward)
def _(weight: Tensor, near: Tensor, far: Tensor, length: int) -> Tensor:
    return _sums(weight, length)


@operator("vandermonde_triton_backward")
def backward(weight: Tensor, near: Tensor, far: Tensor, dsums: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of weight * far (k, d, n, m), and of near."""
    k, d, n = weight.shape
    c, m = near.shape[-1], far.shape[-1]
    dleft, dnear = dsums.new_empty(2, k, d, n, m), dsums.new_empty(2, d, n, c)
    dsums = dsums.contiguous()
    shape = (d, n, k, c, m, dsums.shape[-1])
    # products of 32 columns beside others may read beyond their tiles (issue 11366 of Triton, 3.6 to 3.7)
    tiles = _tiles(dsums)
    entries = -(-n // tiles["ENTRIES"])
    with on_device(dsums):
        _kernels().backward_rows[d, k * -(-m // tiles["ROWS"]), entries](
            _parts(near), dsums, dleft, *shape, **tiles
        )
        _kernels().backward_columns[d, entries, -(-c // tiles["COLUMNS"])](
            pairs(weight), _parts(far), dsums, dnear, *shape, **tiles
        )
    return torch.complex(*dleft), torch.complex(*dnear)


@torch.library.register_fake(backward)
def _(weight: Tensor, near: Tensor, far: Tensor, dsums: Tensor) -> tuple[Tensor, Tensor]:
    return weight.new_empty(*weight.shape, far.shape[-1]), near.new_empty(near.shape)


def _tiles(sums: Tensor) -> dict[str, Any]:
    double = sums.dtype == torch.float64
    size = TILE // 2 if double else TILE
    # three products of ten bits each, where one of 23 has no tensor cores
    precision = "ieee" if double else "tf32x3"
    return {"ROWS": size, "COLUMNS": size, "ENTRIES": size, "PRECISION": precision}


def _sums(weight: Tensor, length: int) -> Tensor:
    return weight.new_empty(*weight.shape[:2], length, dtype=real_dtype(weight.dtype))


def _parts(x: Tensor) -> Tensor:
    """Real and imaginary parts (2, ...) of complex numbers."""
    return torch.view_as_real(x.resolve_conj()).movedim(-1, 0).contiguous()


@functools.cache
def _kernels() -> ModuleType:
    from linrec.ops.kernels.fft import vandermonde_triton as vandermonde_triton_kernels

    return vandermonde_triton_kernels
