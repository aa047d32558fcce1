"""Sums over the powers of many numbers, from two short tables of powers.

With l = c i + j, a^l = (a^c)^i a^j: tables of about sqrt(length) powers make all of them by a product of
matrices, which sums over the numbers at once. So nothing of size numbers x length is formed, in either pass.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Powers(NamedTuple):
    """The powers a^0 .. a^(length - 1) of numbers a (d, n), as two tables.

    Args:
        near: a^j for j < c, (d, n, c).
        far: a^(c i) for i < m, (d, n, m), with c m >= length.
        length: how many powers there are.
    """

    near: Tensor
    far: Tensor
    length: int


def powers(a: Tensor, length: int, rows: int = 1) -> Powers:
    """Return tables of the powers of `a`, with the dtype of `a`.

    They are formed in double precision, by squaring, so that a power has the error of rounding alone; also
    where `a` is zero.

    Args:
        a: (d, n), real or complex.
        length: at least 1.
        rows: how many sums the tables are for, which says how long each should be.

    Example:
        >>> near, far, _ = powers(torch.tensor([[0.5]]), 4)
        >>> near.flatten().tolist(), far.flatten().tolist()
        ([1.0, 0.5], [1.0, 0.25])
    """
    size = min(length, 1 << round(math.log2(length * max(1, rows)) / 2))
    wide = a if a.device.type == "mps" else a.to(torch.complex128 if a.is_complex() else torch.float64)
    near, step = _doubled(wide, size)
    far, _ = _doubled(step, -(-length // size))
    return Powers(near.to(a.dtype), far.to(a.dtype), length)


def sums_of_powers(tables: Powers, weight: Tensor) -> Tensor:
    """Return K_l = Re sum_n w_n a_n^l for all l: a product with Vandermonde's matrix.

    Args:
        tables: of a (d, n).
        weight: w (..., d, n), complex exactly where a is.

    Returns:
        K (..., d, length), real.
    """
    near, far, length = tables
    left = (weight[..., None] * far).mT
    if left.is_complex():
        # Re(x y) = (Re x, Im x) . (Re y, -Im y)
        left = torch.view_as_real(left).flatten(-2)
        near = torch.view_as_real(near.conj().resolve_conj()).transpose(-1, -2).flatten(-3, -2)
    return torch.einsum("...dmn,dnc->...dmc", left, near).flatten(-2)[..., :length]


def moments(tables: Powers, values: Tensor) -> Tensor:
    """Return M_n = sum_l a_n^l v_l: a product with Vandermonde's matrix transposed.

    Args:
        tables: of a (d, n).
        values: v (..., d, length), real.

    Returns:
        M (..., d, n), complex where a is.
    """
    near, far, length = tables
    missing = near.shape[-1] * far.shape[-1] - length
    blocks = functional.pad(values, (0, missing)).unflatten(-1, (far.shape[-1], near.shape[-1]))
    if near.is_complex():
        pairs = torch.view_as_real(near)
        inner = torch.view_as_complex(torch.einsum("...dmc,dncp->...dmnp", blocks, pairs).contiguous())
    else:
        inner = torch.einsum("...dmc,dnc->...dmn", blocks, near)
    return (inner * far.mT).sum(-2)


def last_power(tables: Powers) -> Tensor:
    """Return a^(length - 1), (d, n)."""
    near, far, length = tables
    i, j = divmod(length - 1, near.shape[-1])
    return far[..., i] * near[..., j]


def _doubled(a: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """a^0 .. a^(size - 1), and a to the next power of two from `size` on."""
    table, step = torch.ones_like(a)[..., None], a
    while table.shape[-1] < size:
        table = torch.cat([table, table * step[..., None]], dim=-1)
        step = step * step
    return table[..., :size], step
