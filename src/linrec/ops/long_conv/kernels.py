"""Kernels of time-invariant state-space models, without the terms that they sum."""

import torch
from jaxtyping import Complex, Float, Inexact
from torch import Tensor

from linrec.ops.dispatch import Pair, refusal, resolve, triton_usable
from linrec.ops.long_conv.cauchy import kernel_of_low_rank
from linrec.ops.long_conv.inputs import name_of
from linrec.ops.long_conv.powers import powers, sums_of_powers
from linrec.ops.precision import real_dtype, without_autocast
from linrec.ops.stability import check_rates, check_steps

PAIRS: tuple[Pair, ...] = (("convolution", "torch"), ("convolution", "triton"))


def vandermonde_kernel(
    a: Inexact[Tensor, "d n"],
    w: Inexact[Tensor, "*more d n"],
    length: int,
    *,
    backend: str = "auto",
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
    if a.ndim != 2 or w.shape[-2:] != a.shape:
        raise ValueError(
            f"`a` must have shape (d, n), and `w` (..., d, n); got {tuple(a.shape)} and {tuple(w.shape)}."
        )
    if a.dtype not in (torch.float32, torch.float64, torch.complex64, torch.complex128):
        raise TypeError(
            f"`a` must be float32, float64, complex64 or complex128; got {name_of(a.dtype)}. Cast it."
        )
    if length < 1:
        raise ValueError(f"`length` must be at least 1 tap; got {length}.")
    chosen = _chosen("vandermonde_kernel", backend, a, "torch")
    if chosen == "triton" and not a.is_complex():
        raise ValueError(
            f"backend='triton' of `vandermonde_kernel` takes a complex `a`; got {name_of(a.dtype)}. "
            "Use backend='torch'."
        )
    w = w if a.is_complex() or not w.is_complex() else w.real
    with without_autocast(a.device.type):
        return sums_of_powers(powers(a, length), w.to(a.dtype), fused=chosen == "triton")


def cauchy_kernel(
    Lambda: Complex[Tensor, "d n"],
    P: Complex[Tensor, "d n r"],
    B: Complex[Tensor, "d n"],
    C: Complex[Tensor, "d n"],
    dt: Float[Tensor, "d"],
    length: int,
    *,
    backend: str = "auto",
) -> Float[Tensor, "d length"]:
    """Make the kernel of a state-space model that is diagonal plus low rank, after the bilinear transform.

        K_dl = C Abar^l Bbar    x' = (diag(Lambda) - P P^*) x + B u

    Each entry stands for a conjugate pair, as do its rows of P, B and C: the sums are over both. The kernel
    is the inverse transform of its spectrum at z = exp(-pi i (2 k + 1) / length), none of which is 1,

        C (I + Abar^length) (I - z Abar)^-1 Bbar

    By Woodbury's identity, that is made of products of (1 + r)^2 vectors with a matrix of Cauchy's kind, of
    entries 1 / ((1 - z) - dt (1 + z) lambda / 2). By torch, spectra are formed at some z at a time, and again
    for the gradients, so that no numbers of size (d, n, length) exist at once; Triton's kernels form the
    matrix in registers. Abar^length is formed by squaring, in double precision.

    `"auto"` takes Triton on CUDA, else torch.

    Args:
        Lambda: diagonal (d, n), complex64 or complex128, with real parts <= 0.
        P: (d, n, r), factors of the low rank, all in the dtype of `Lambda`.
        B: what the input is multiplied by (d, n).
        C: what states are multiplied by (d, n).
        dt: step sizes (d,), real, >= 0. Values are looked at on the CPU; elsewhere, and under torch.compile,
            that would mean waiting.
        length: how many taps, at least 1.
        backend: "auto", "torch" or "triton".

    Returns:
        K (d, length), real.

    Raises:
        TypeError: dtypes that are not complex, or differ in precision.
        ValueError: shapes that do not fit together, values out of range, a `length` below 1, or a `backend`
            that is unknown or cannot run here.

    Source:
        S4 (Gu, Goel and Ré, 2022), theorem 3 and its appendix on the convolution kernel; -P P^* is the stable
        form of SaShiMi (Goel, Gu, Donahue and Ré, 2022).

    Example:
        >>> import torch
        >>> Lambda, one = torch.tensor([[-1.0 + 0j]]), torch.ones(1, 1, dtype=torch.complex64)
        >>> cauchy_kernel(Lambda, 0 * one[..., None], one, one / 2, torch.ones(1), 3)
        tensor([[0.6667, 0.2222, 0.0741]])
    """
    shape = Lambda.shape
    if len(shape) != 2 or (P.shape[:-1], B.shape, C.shape, dt.shape) != (shape, shape, shape, shape[:1]):
        raise ValueError(
            "`Lambda`, `P`, `B`, `C` and `dt` must have shapes (d, n), (d, n, r), (d, n), (d, n) and (d,); "
            f"got {', '.join(str(tuple(x.shape)) for x in (Lambda, P, B, C, dt))}."
        )
    if Lambda.dtype not in (torch.complex64, torch.complex128):
        raise TypeError(f"`Lambda` must be complex64 or complex128; got {name_of(Lambda.dtype)}. Cast it.")
    for name, tensor, dtype in (
        ("P", P, Lambda.dtype),
        ("B", B, Lambda.dtype),
        ("C", C, Lambda.dtype),
        ("dt", dt, real_dtype(Lambda.dtype)),
    ):
        if tensor.dtype != dtype:
            raise TypeError(
                f"`{name}` must be {name_of(dtype)} beside `Lambda` in {name_of(Lambda.dtype)}; "
                f"got {name_of(tensor.dtype)}. Cast it."
            )
    if length < 1:
        raise ValueError(f"`length` must be at least 1 tap; got {length}.")
    check_rates("Lambda", Lambda)
    check_steps("dt", dt)
    auto = "triton" if triton_usable(Lambda.device.type) else "torch"
    chosen = _chosen("cauchy_kernel", backend, Lambda, auto)
    with without_autocast(Lambda.device.type):
        return kernel_of_low_rank(Lambda, P, B, C, dt, length, fused=chosen == "triton")


def _chosen(op_name: str, backend: str, x: Tensor, auto: str) -> str:
    """Who runs a call on the device of `x`: the backend that is given, or the one for "auto"."""
    _, chosen = resolve(op_name, PAIRS, "auto", backend, [("convolution", auto)])
    refused = refusal(op_name, chosen, x.device.type)
    if refused is not None:
        raise ValueError(refused)
    return chosen
