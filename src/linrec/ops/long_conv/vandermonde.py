"""Kernels of diagonal state-space models: products with Vandermonde's matrix."""

from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float, Inexact
from torch import Tensor

from linrec.ops.core.backends import Backend, choose
from linrec.ops.core.checks import check_axes, check_shape, check_tensors, name_of, tensor_fields
from linrec.ops.core.precision import without_autocast
from linrec.ops.long_conv.powers import powers, sums_of_powers


class Vandermonde(NamedTuple):
    """The arguments: a (d, n), w (..., d, n), and the number of taps."""

    a: Tensor
    w: Tensor
    length: int


def _kernel(given: Vandermonde, *, fused: bool) -> Tensor:
    a, w, length = given
    w = w if a.is_complex() or not w.is_complex() else w.real
    return sums_of_powers(powers(a, length), w.to(a.dtype), fused=fused)


# on an H200, Triton's kernels take a little less time for 784 taps, and more from 1,024 taps on
BACKENDS = (
    Backend("convolution", "torch", partial(_kernel, fused=False), "products of two tables of powers"),
    Backend(
        "convolution",
        "triton",
        partial(_kernel, fused=True),
        "the same, tile by tile",
        accepts=lambda given: given.a.is_complex(),
        requires="a complex `a`",
    ),
)
_TENSORS = tensor_fields(Vandermonde)


def vandermonde_kernel(
    a: Inexact[Tensor, "d n"], w: Inexact[Tensor, "*more d n"], length: int, *, backend: str = "auto"
) -> Float[Tensor, "*more d length"]:
    """Sum the powers of many transitions: the kernel of a diagonal state-space model.

        K_dl = Re(sum_n w_dn a_dn^l)

    It is what x_t = a x_{t-1} + b u_t, y_t = Re(c x_t) answers to an impulse, with w = c b; where an entry of
    the state stands for a conjugate pair, pass twice that. With w = c a x_0, it is what an initial state
    gives. Powers are products of two tables of about sqrt(length) numbers for each a, and the sums are
    products of matrices: no numbers of size (d, n, length) are formed, for gradients neither.

    `"auto"` takes torch: on an H200, Triton's kernels took a little less time for 784 taps, and more from
    1,024 taps on.

    Args:
        a: transitions (d, n), real or complex.
        w: weights (..., d, n), in the precision of `a`, real or complex.
        length: how many taps, at least 1.
        backend: "auto", "torch" or "triton". Triton takes a complex `a`.

    Returns:
        K (..., d, length), real, in the precision of `a`.

    Raises:
        TypeError: an `a` that is an integer or in half precision.
        ValueError: shapes that do not fit together, a `length` below 1, or a `backend` that is unknown or
            cannot run here.

    Source:
        S4D (Gu, Gupta, Goel and Ré, 2022), where the kernel is a product with Vandermonde's matrix.

    Example:
        >>> import torch
        >>> vandermonde_kernel(torch.tensor([[0.5, 1.0]]), torch.ones(1, 2), 4).tolist()
        [[2.0, 1.5, 1.25, 1.125]]
    """
    given = Vandermonde(a, w, length)
    check_tensors(given, _TENSORS, "a")
    check_axes("a", a, "(d, n)", "Pass the transitions of every channel.")
    check_shape("w", w, "(..., d, n)", (*w.shape[:-2], *a.shape), "Pass a weight for every transition.")
    if a.dtype not in (torch.float32, torch.float64, torch.complex64, torch.complex128):
        raise TypeError(
            f"`a` must be float32, float64, complex64 or complex128; got {name_of(a.dtype)}. Cast it."
        )
    if length < 1:
        raise ValueError(f"`length` must be at least 1 tap; got {length}.")
    entry = choose("vandermonde_kernel", BACKENDS, given, a.device.type, "auto", backend)
    with without_autocast(a.device.type):
        kernel: Tensor = entry.run(given)
    return kernel
