"""Sums over the powers of many numbers, from two short tables of powers.

With l = c i + j, a^l = (a^c)^i a^j: tables of about sqrt(length) powers make all of them by a product of
matrices, which sums over the numbers at once. So nothing of size numbers x length is formed, in either pass.
Triton's kernels can make the sums too.
"""

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from linrec.ops.long_conv import vandermonde_triton


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
    # by comparisons alone, which torch.compile knows for lengths that it takes as variables
    size = 1
    while 2 * size * size <= length * max(1, rows):
        size *= 2
    size = min(length, size)
    near, far = _Tables.apply(a, size, -(-length // size))
    return Powers(near, far, length)


def sums_of_powers(tables: Powers, weight: Tensor, *, fused: bool = False) -> Tensor:
    """Return K_l = Re sum_n w_n a_n^l for all l: a product with Vandermonde's matrix.

    Args:
        tables: of a (d, n).
        weight: w (..., d, n), complex exactly where a is.
        fused: have Triton's kernels make the sums; of complex numbers, each channel with its own powers.

    Returns:
        K (..., d, length), real.
    """
    near, far, length = tables
    if fused and weight.numel():
        sums: Tensor = VandermondeSums.apply(weight.reshape(-1, *near.shape[:2]), near, far, length)
        return sums.view(*weight.shape[:-1], length)
    return _products(weight, near, far, length)


def _products(weight: Tensor, near: Tensor, far: Tensor, length: int) -> Tensor:
    left = (weight[..., None] * far).mT
    if left.is_complex():
        # Re(x y) = (Re x, Im x) . (Re y, -Im y)
        left = torch.view_as_real(left).flatten(-2)
        near = torch.view_as_real(near.conj().resolve_conj()).transpose(-1, -2).flatten(-3, -2)
    return torch.einsum("...dmn,dnc->...dmc", left, near).flatten(-2)[..., :length]


class VandermondeSums(torch.autograd.Function):
    """K = VandermondeSums.apply(w, near, far, length) by Triton, w (k, d, n); both tables have gradients."""

    @staticmethod
    def forward(weight: Tensor, near: Tensor, far: Tensor, length: int) -> Tensor:
        """Run the kernel."""
        sums: Tensor = vandermonde_triton.forward(weight, near, far, length)
        return sums

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int], output: Tensor) -> None:
        """Keep the inputs; terms are formed again."""
        ctx.save_for_backward(*inputs[:3])
        ctx.length = inputs[3]

    @staticmethod
    def backward(ctx: Any, dsums: Tensor) -> tuple[Tensor | None, ...]:
        """Run the kernels of the gradients."""
        weight, near, far = ctx.saved_tensors
        if torch.is_grad_enabled():
            # gradients that are to be differentiated again are made of torch operations
            inputs = [x for x in ctx.saved_tensors if x.requires_grad]
            sums = _products(weight, near, far, ctx.length)
            found = iter(torch.autograd.grad(sums, inputs, dsums, create_graph=True))
            return *(next(found) if x.requires_grad else None for x in ctx.saved_tensors), None
        dleft, dnear = vandermonde_triton.backward(weight, near, far, dsums)
        dweight, dfar = (dleft * far.conj()).sum(-1), (dleft * weight[..., None].conj()).sum(0)
        return dweight, dnear, dfar, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        """Map the products of matrices."""
        return torch.func.vmap(_products, in_dims)(*inputs), 0


# autograd asks for it at every call
VandermondeSums.forward.__signature__ = inspect.signature(VandermondeSums.forward)  # type: ignore[attr-defined]


def weighted_by_age(tables: Powers, values: Tensor) -> Tensor:
    """Return M_n = sum_l a_n^(length - 1 - l) v_l: a product with Vandermonde's matrix transposed.

    Args:
        tables: of a (d, n).
        values: v (b, length, d), real.

    Returns:
        M (b, d, n), complex where a is.
    """
    near, far, length = tables
    # the last value has the power zero: zeros that are missing go in front
    missing = near.shape[-1] * far.shape[-1] - length
    blocks = functional.pad(values, (0, 0, missing, 0)).unflatten(1, (far.shape[-1], near.shape[-1]))
    near, far = near.flip(-1), far.flip(-1)
    if near.is_complex():
        pairs = torch.view_as_real(near)
        inner = torch.view_as_complex(torch.einsum("bmcd,dncp->bdmnp", blocks, pairs).contiguous())
    else:
        inner = torch.einsum("bmcd,dnc->bdmn", blocks, near)
    return (inner * far.mT).sum(-2)


def last_power(tables: Powers) -> Tensor:
    """Return a^(length - 1), (d, n)."""
    near, far, length = tables
    i, j = divmod(length - 1, near.shape[-1])
    return far[..., i] * near[..., j]


class _Tables(torch.autograd.Function):
    """near, far = _Tables.apply(a, c, m): a^j for j < c, and a^(c i) for i < m, with nothing kept but a."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, size: int, count: int) -> tuple[Tensor, Tensor]:
        """Square in double precision."""
        near, far = power_tables(a, size, count)
        return near.to(a.dtype), far.to(a.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int, int], output: tuple[Tensor, Tensor]) -> None:
        """Keep a; the tables are in use elsewhere, but in single precision."""
        a, ctx.size, ctx.count = inputs
        ctx.save_for_backward(a)

    @staticmethod
    def backward(ctx: Any, dnear: Tensor, dfar: Tensor) -> tuple[Tensor, None, None]:
        """da = sum_j conj(j a^(j-1)) dnear_j + sum_i conj(c i a^(c i - 1)) dfar_i."""
        (a,) = ctx.saved_tensors
        near, far = power_tables(a, ctx.size, ctx.count)
        j, i = (torch.arange(1, x.shape[-1], device=a.device) for x in (near, far))
        da = (j * near[..., :-1].conj() * dnear[..., 1:]).sum(-1)
        if ctx.count > 1:
            # a^(c i - 1) = a^(c (i - 1)) a^(c - 1)
            steps = (ctx.size * i * far[..., :-1].conj() * dfar[..., 1:]).sum(-1)
            da = da + near[..., -1].conj() * steps
        return da.to(a.dtype), None, None


def power_tables(a: Tensor, size: int, count: int) -> tuple[Tensor, Tensor]:
    """Return a^j for j < size, (d, n, size), and a^(size i) for i < count, in double precision."""
    if a.device.type != "mps":
        a = a.to(torch.complex128 if a.is_complex() else torch.float64)
    near, step = _doubled(a, size)
    return near, _doubled(step, count)[0]


def _doubled(a: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """a^0 .. a^(size - 1), and a to the next power of two from `size` on."""
    table, step = torch.ones_like(a)[..., None], a
    while table.shape[-1] < size:
        table = torch.cat([table, table * step[..., None]], dim=-1)
        step = step * step
    return table[..., :size], step
