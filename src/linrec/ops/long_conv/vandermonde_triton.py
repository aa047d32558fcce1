"""Sums over powers on GPUs by Triton, as operators that torch.compile leaves whole."""

import functools
from types import ModuleType

import torch
from torch import Tensor

from linrec.ops.long_conv.triton import on_device, pairs
from linrec.ops.operators import operator
from linrec.ops.precision import real_dtype

# of the tile of numbers that a program has at once
TILE = 32


@operator("vandermonde_triton")
def forward(weight: Tensor, near: Tensor, far: Tensor, length: int) -> Tensor:
    """Return S (k, d, length) of weights (k, d, n), near (d, n, c) and far (d, n, m), all complex."""
    sums = _sums(weight, length)
    k, d, n = weight.shape
    c, m = near.shape[-1], far.shape[-1]
    with on_device(weight):
        _kernels().forward[d, -(-k * m // TILE), -(-c // TILE)](
            *map(pairs, (weight, near, far)), sums, d, n, k, c, m, length, ROWS=TILE, COLUMNS=TILE
        )
    return sums


@torch.library.register_fake(forward)
def _(weight: Tensor, near: Tensor, far: Tensor, length: int) -> Tensor:
    return _sums(weight, length)


@operator("vandermonde_triton_backward")
def backward(weight: Tensor, near: Tensor, far: Tensor, dsums: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of weight * far (k, d, n, m), and of near."""
    dleft, dnear = _gradients(weight, near, far)
    k, d, n = weight.shape
    c, m = near.shape[-1], far.shape[-1]
    weight, near, far = map(pairs, (weight, near, far))
    dsums = dsums.contiguous()
    shape = (d, n, k, c, m, dsums.shape[-1])
    with on_device(dsums):
        _kernels().backward_rows[d, -(-k * m // TILE), -(-n // TILE)](
            near, dsums, torch.view_as_real(dleft), *shape, ROWS=TILE, ENTRIES=TILE
        )
        _kernels().backward_columns[d, -(-n // TILE), -(-c // TILE)](
            weight, far, dsums, torch.view_as_real(dnear), *shape, ENTRIES=TILE, COLUMNS=TILE
        )
    return dleft, dnear


@torch.library.register_fake(backward)
def _(weight: Tensor, near: Tensor, far: Tensor, dsums: Tensor) -> tuple[Tensor, Tensor]:
    return _gradients(weight, near, far)


def _sums(weight: Tensor, length: int) -> Tensor:
    return weight.new_empty(*weight.shape[:2], length, dtype=real_dtype(weight.dtype))


def _gradients(weight: Tensor, near: Tensor, far: Tensor) -> tuple[Tensor, Tensor]:
    return weight.new_empty(*weight.shape, far.shape[-1]), near.new_empty(near.shape)


@functools.cache
def _kernels() -> ModuleType:
    from linrec.ops.long_conv import vandermonde_triton_kernels

    return vandermonde_triton_kernels
