"""Sums of powers from two short tables of powers: kernels of diagonal models.

With l = c i + j, a^l = (a^c)^i a^j. So tables of about sqrt(length) powers suffice, and a matrix product
forms all powers and sums over the transitions a at once. Neither pass materialises (transitions x length)
numbers. Triton kernels can compute the sums too.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Inexact
from torch import Tensor
from torch.nn import functional

from linrec.ops.core.backends import Backend, choose
from linrec.ops.core.checks import check_axes, check_dtype, check_shape, check_tensors, tensor_fields
from linrec.ops.core.kernel import Differentiable, Gradients, Memory, kernel_op
from linrec.ops.core.precision import COMPLEX, in_double, real_dtype, without_autocast
from linrec.ops.kernels.launch import Kernels, on_device, pairs, power_of_2
from linrec.rules import at_least, typed

KERNELS = Kernels("fft.triton")
TILE = 64
"""Rows, columns and entries of the tiles that a program multiplies."""

LEAST = 16
"""Smallest tile of a tensor core."""


class Powers(NamedTuple):
    """The powers a^0 .. a^(length - 1) of numbers a (d, n), as two tables.

    Attributes:
        near: a^j for j < c, (d, n, c).
        far: a^(c i) for i < m, (d, n, m), with c m >= length.
        length: number of powers.
    """

    near: Tensor
    far: Tensor
    length: int

    @property
    def last(self) -> Tensor:
        """Return the last power, a^(length - 1), (d, n)."""
        i, j = divmod(self.length - 1, self.near.shape[-1])
        return self.far[..., i] * self.near[..., j]


def powers(a: Tensor, length: int, rows: int = 1) -> Powers:
    """Return tables of the powers of `a`, in the dtype of `a`.

    The powers come from repeated squaring in double precision, so that each has only its own rounding error,
    also if `a` is zero.

    Args:
        a: (d, n), real or complex.
        length: at least 1.
        rows: number of sums that use the tables; it determines the best lengths of the tables.
    """
    # only comparisons, which torch.compile supports for symbolic lengths
    size = 1
    while 2 * size * size <= length * max(1, rows):
        size *= 2
    size = min(length, size)
    near, far = power_tables_of(Base(a, size, -(-length // size)))
    return Powers(near, far, length)


class Weighted(NamedTuple):
    """Weights (k, d, n), and tables near (d, n, c) and far (d, n, m) of `length` powers, all complex."""

    weight: Tensor
    near: Tensor
    far: Tensor
    length: int


class Sums(NamedTuple):
    """Sums over n, of shape (..., length)."""

    sums: Tensor


def sums_of_powers(tables: Powers, weight: Tensor, *, fused: bool = False) -> Tensor:
    """Return K_l = Re sum_n w_n a_n^l for all l: a product with a Vandermonde matrix.

    Args:
        tables: powers of a (d, n).
        weight: w (..., d, n), complex if and only if a is complex.
        fused: whether Triton kernels compute the sums, which needs complex a and weights.

    Returns:
        K (..., d, length), real.
    """
    near, far, length = tables
    if weight.numel() == 0:
        return (weight * near[..., 0]).sum(-1, keepdim=True).real.repeat_interleave(length, -1)
    if fused:
        sums = sums_by_triton(Weighted(weight.reshape(-1, *near.shape[:2]), near, far, length)).sums
        return sums.view(*weight.shape[:-1], length)
    return _sums_by_torch(Weighted(weight, near, far, length)).sums


def _sums_by_torch(given: Weighted) -> Sums:
    weight, near, far, length = given
    left = (weight[..., None] * far).mT
    if left.is_complex():
        # Re(x y) = (Re x, Im x) . (Re y, -Im y)
        left = torch.view_as_real(left).flatten(-2)
        near = torch.view_as_real(near.conj().resolve_conj()).transpose(-1, -2).flatten(-3, -2)
    return Sums(torch.einsum("...dmn,dnc->...dmc", left, near).flatten(-2)[..., :length])


def _forward(out: Sums, given: Weighted) -> None:
    weight, near, far, length = given
    (k, d, n), c, m, tiles = weight.shape, near.shape[-1], far.shape[-1], _tiles(out.sums)
    tiles["ENTRIES"] = min(max(power_of_2(n), LEAST), tiles["ENTRIES"])
    grid = d, k * -(-m // tiles["ROWS"]), -(-c // tiles["COLUMNS"])
    with on_device(weight.device):
        KERNELS.vandermonde[grid](
            pairs(weight), _parts(near), _parts(far), out.sums, d, n, c, m, length, **tiles
        )


def _adjoint(out: Gradients, given: Weighted, kept: Sums, d_sums: Sums) -> None:
    weight, near, far, length = given
    (k, d, n), c, m, tiles = weight.shape, near.shape[-1], far.shape[-1], _tiles(d_sums.sums)
    dsums, shape = d_sums.sums.contiguous(), (d, n, k, c, m, length)
    # gradients of weight * far, and of near
    dleft, dnear = dsums.new_empty(2, k, d, n, m), dsums.new_empty(2, d, n, c)
    # kernels with several products of 32 columns may read beyond tiles (issue 11366 of Triton, 3.6 to 3.7)
    entries = -(-n // tiles["ENTRIES"])
    with on_device(dsums.device):
        KERNELS.vandermonde_rows[d, k * -(-m // tiles["ROWS"]), entries](
            _parts(near), dsums, dleft, *shape, **tiles
        )
        KERNELS.vandermonde_columns[d, entries, -(-c // tiles["COLUMNS"])](
            pairs(weight), _parts(far), dsums, dnear, *shape, **tiles
        )
    of_left = torch.complex(*dleft)
    out.weight.copy_((of_left * far.conj()).sum(-1))
    out.near.copy_(torch.complex(*dnear))
    out.far.copy_((of_left * weight[..., None].conj()).sum(0))


def _tiles(sums: Tensor) -> dict[str, Any]:
    # "tf32x3" computes float32 products as three tf32 products on tensor cores
    size, precision = (TILE // 2, "ieee") if sums.dtype == torch.float64 else (TILE, "tf32x3")
    return {"ROWS": size, "COLUMNS": size, "ENTRIES": size, "PRECISION": precision}


def _parts(x: Tensor) -> Tensor:
    """Return real and imaginary parts (2, ...) of complex numbers."""
    return torch.view_as_real(x.resolve_conj()).movedim(-1, 0).contiguous()


sums_by_triton = kernel_op(
    "vandermonde_triton", Weighted, Sums,
    lambda given, keep: [Memory((*given.weight.shape[:2], given.length), real_dtype(given.weight.dtype))],
    _forward, _adjoint, plain=_sums_by_torch,
)  # fmt: skip


def weighted_by_age(tables: Powers, values: Tensor) -> Tensor:
    """Return M_n = sum_l a_n^(length - 1 - l) v_l: a product with a transposed Vandermonde matrix.

    Args:
        tables: powers of a (d, n).
        values: v (b, length, d), real.

    Returns:
        M (b, d, n), complex if a is complex.
    """
    near, far, length = tables
    # the last value has the power zero, so padding goes to the front
    missing = near.shape[-1] * far.shape[-1] - length
    blocks = functional.pad(values, (0, 0, missing, 0)).unflatten(1, (far.shape[-1], near.shape[-1]))
    near, far = near.flip(-1), far.flip(-1)
    if near.is_complex():
        pairs = torch.view_as_real(near)
        inner = torch.view_as_complex(torch.einsum("bmcd,dncp->bdmnp", blocks, pairs).contiguous())
    else:
        inner = torch.einsum("bmcd,dnc->bdmn", blocks, near)
    return (inner * far.mT).sum(-2)


def power_tables(a: Tensor, size: int, count: int) -> tuple[Tensor, Tensor]:
    """Return a^j for j < size, (d, n, size), and a^(size i) for i < count, in double precision."""
    near, step = _doubled(in_double(a), size)
    return near, _doubled(step, count)[0]


def _doubled(a: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return a^0 .. a^(size - 1), and a^s for the smallest power of two s >= size."""
    table, step = torch.ones_like(a)[..., None], a
    while table.shape[-1] < size:
        table = torch.cat([table, table * step[..., None]], dim=-1)
        step = step * step
    return table[..., :size], step


class Base(NamedTuple):
    """Numbers a (d, n), and the length of each table."""

    a: Tensor
    size: int
    blocks: int


class Tables(NamedTuple):
    """a^j for j < size, and a^(size i) for i < blocks."""

    near: Tensor
    far: Tensor


def _tables(given: Base, keep: bool) -> Tables:
    return Tables(*(table.to(given.a.dtype) for table in power_tables(*given)))


def _gradient_of_tables(given: Base, kept: Tables, d: Tables, needs: Sequence[bool]) -> tuple[Any, ...]:
    """Return da = sum_j conj(j a^(j-1)) dnear_j + sum_i conj(c i a^(c i - 1)) dfar_i."""
    a, size, blocks = given
    near, far = power_tables(a, size, blocks)
    j, i = (torch.arange(1, x.shape[-1], device=a.device) for x in (near, far))
    da = (j * near[..., :-1].conj() * d.near[..., 1:]).sum(-1)
    if blocks > 1:
        # a^(c i - 1) = a^(c (i - 1)) a^(c - 1)
        steps = (size * i * far[..., :-1].conj() * d.far[..., 1:]).sum(-1)
        da = da + near[..., -1].conj() * steps
    return da, None, None


# only a is saved: the tables live on elsewhere, but in single precision
power_tables_of = Differentiable(Base, Tables, _tables, _gradient_of_tables)


class Vandermonde(NamedTuple):
    """The arguments: a (d, n), w (..., d, n), and the number of taps."""

    a: Tensor
    w: Tensor
    length: int


def _kernel(given: Vandermonde, *, fused: bool) -> Tensor:
    a, w, length = given
    w = w if a.is_complex() or not w.is_complex() else w.real
    return sums_of_powers(powers(a, length), w.to(a.dtype), fused=fused)


_COMPLEX: Any = {"accepts": lambda given: given.a.is_complex(), "requires": "a complex `a`"}
# on an H200, Triton is slightly faster for 784 taps, and slower from 1,024 taps on
BACKENDS = (
    Backend("convolution", "torch", partial(_kernel, fused=False), "products of two tables of powers"),
    Backend("convolution", "triton", partial(_kernel, fused=True), "the same, tile by tile", **_COMPLEX),
)
_TENSORS = tensor_fields(Vandermonde)


def vandermonde_kernel(
    a: Inexact[Tensor, "d n"], w: Inexact[Tensor, "*more d n"], length: int, *, backend: str = "auto"
) -> Float[Tensor, "*more d length"]:
    """Return the kernel of a diagonal state-space model: a sum of powers of its transitions.

        K_dl = Re(sum_n w_dn a_dn^l)

    With w = c b, K is the impulse response of x_t = a x_{t-1} + b u_t, y_t = Re(c x_t). If an entry of the
    state represents a conjugate pair, pass 2 w. With w = c a x_0, K is the response to an initial state x_0.
    Powers are products of two tables of about sqrt(length) numbers for each a, and the sums are matrix
    products: (d, n, length) numbers are never materialised, nor for the gradients.

    `"auto"` uses torch: on an H200, Triton was slightly faster for 784 taps, and slower from 1,024 taps on.

    Args:
        a: transitions (d, n), real or complex.
        w: weights (..., d, n), in the precision of `a`, real or complex.
        length: number of taps, at least 1.
        backend: "auto", "torch" or "triton". Triton supports only a complex `a`.

    Returns:
        K (..., d, length), real, in the precision of `a`.

    Raises:
        TypeError: `a` is an integer or in half precision.
        ValueError: shapes do not match, `length` is below 1, or `backend` is unknown or cannot run here.

    Source:
        S4D (Gu, Gupta, Goel and Ré, 2022), where the kernel is a product with a Vandermonde matrix.

    Example:
        >>> import torch
        >>> vandermonde_kernel(torch.tensor([[0.5, 1.0]]), torch.ones(1, 2), 4).tolist()
        [[2.0, 1.5, 1.25, 1.125]]
    """
    given = Vandermonde(a, w, length)
    check_tensors(given, _TENSORS, "a")
    check_axes("a", a, "(d, n)", "Pass the transitions of every channel.")
    check_shape("w", w, "(..., d, n)", (*w.shape[:-2], *a.shape), "Pass a weight for every transition.")
    check_dtype("a", a, (*COMPLEX, *COMPLEX.values()))
    return made_by("vandermonde_kernel", BACKENDS, given, backend)


def made_by(op_name: str, backends: Sequence[Backend], given: Any, backend: str) -> Tensor:
    """Run the chosen backend of a kernel function on a named tuple, whose first field is a tensor."""
    # a graph's length may be a symbol
    if not torch.compiler.is_compiling():
        typed({"length": int}, length=given.length)
    at_least(1, length=given.length)
    device = given[0].device.type
    with without_autocast(device):
        kernel: Tensor = choose(op_name, backends, given, device, "auto", backend).run(given)
    return kernel
