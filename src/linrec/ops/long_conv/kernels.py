"""Kernels of time-invariant state-space models, without the terms that they sum."""

from jaxtyping import Float, Inexact
from torch import Tensor, autocast

from linrec.ops.long_conv.powers import powers, sums_of_powers


def vandermonde_kernel(
    a: Inexact[Tensor, "d n"], w: Inexact[Tensor, "*more d n"], length: int
) -> Float[Tensor, "*more d length"]:
    """Sum the powers of many transitions: the kernel of a diagonal state-space model.

        K_dl = Re(sum_n w_dn a_dn^l)

    It is what x_t = a x_{t-1} + b u_t, y_t = Re(c x_t) answers to an impulse, with w = c b; where an entry of
    the state stands for a conjugate pair, pass twice that. With w = c a x_0, it is what an initial state
    gives. Powers are products of two tables of about sqrt(length) numbers for each a, and the sums are
    products of matrices: no numbers of size (d, n, length) are formed, for gradients neither.

    Args:
        a: transitions (d, n), real or complex.
        w: weights (..., d, n), in the precision of `a`, real or complex.
        length: how many taps, at least 1.

    Returns:
        K (..., d, length), real, in the precision of `a`.

    Raises:
        ValueError: shapes that do not fit together, or a `length` below 1.

    Source:
        S4D (Gu, Gupta, Goel and Ré, 2022), where the kernel is a product with Vandermonde's matrix.

    Example:
        >>> import torch
        >>> vandermonde_kernel(torch.tensor([[0.5, 1.0]]), torch.ones(1, 2), 4).tolist()
        [[2.0, 1.5, 1.25, 1.125]]
    """
    if a.ndim != 2 or w.shape[-2:] != a.shape:
        raise ValueError(
            f"`a` must have shape (d, n), and `w` (..., d, n); got {tuple(a.shape)} and {tuple(w.shape)}."
        )
    if length < 1:
        raise ValueError(f"`length` must be at least 1 tap; got {length}.")
    w = w if a.is_complex() or not w.is_complex() else w.real
    with autocast(a.device.type, enabled=False):
        return sums_of_powers(powers(a, length), w.to(a.dtype))
