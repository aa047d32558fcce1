"""Kernels of diagonal plus low-rank state-space models, by products with a Cauchy-like matrix.

The Triton kernels form the matrix only in registers.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from linrec.ops.core import checks
from linrec.ops.core.ambient import checkpointed
from linrec.ops.core.backends import Backend
from linrec.ops.core.kernel import NOTHING, Gradients, Memory, kernel_op, like
from linrec.ops.core.precision import COMPLEX, in_double, real_dtype
from linrec.ops.kernels.launch import Kernels, on_device, pairs, power_of_2
from linrec.ops.long_conv.powers import Sums, made_by

KERNELS = Kernels("fft.triton")
FREQUENCIES, ENTRIES = 64, 16
"""Number of frequencies, and of entries of the state, per tile of a program."""


class LowRank(NamedTuple):
    """The arguments of `cauchy_kernel`."""

    Lambda: Tensor
    P: Tensor
    B: Tensor
    C: Tensor
    dt: Tensor
    length: int


class Cauchy(NamedTuple):
    """Weights and matrix of a product.

    Attributes:
        weights: w (d, k, n).
        Lambda: (d, n).
        around: (d, f).
        rest: (f,), not differentiated.
    """

    weights: Tensor
    Lambda: Tensor
    around: Tensor
    rest: Tensor


def sums_by_torch(given: Cauchy) -> Sums:
    """Return S_kf = sum_n w_kn / (rest_f - lambda_n around_f), (d, k, f), with the matrix in memory."""
    weights, Lambda, around, rest = given
    return Sums(weights @ (1 / (rest - Lambda[..., None] * around[:, None])))


def _forward(out: Sums, given: Cauchy) -> None:
    (d, k, f), n, sums = out.sums.shape, given.Lambda.shape[1], torch.view_as_real(out.sums)
    grid, constants = (d, -(-f // FREQUENCIES)), {"K": k, "ROWS": power_of_2(k), "F": FREQUENCIES}
    with on_device(sums.device):
        KERNELS.cauchy[grid](*map(pairs, given), sums, n, f, **constants)


def _adjoint(out: Gradients, given: Cauchy, kept: Sums, d: Sums) -> None:
    (models, k, f), n = d.sums.shape, given.Lambda.shape[1]
    read, rows = [pairs(x) for x in (*given, d.sums)], {"K": k, "ROWS": power_of_2(k)}
    dweights, dLambda, daround = map(torch.view_as_real, (out.weights, out.Lambda, out.around))
    entries, frequencies = -(-n // ENTRIES), -(-f // FREQUENCIES)
    constants = {"F": max(1, FREQUENCIES // 2), "N": ENTRIES} | rows
    with on_device(d.sums.device):
        KERNELS.cauchy_entries[models, entries](*read, dweights, dLambda, n, f, **constants)
        KERNELS.cauchy_frequencies[models, frequencies](*read, daround, n, f, **rows, F=FREQUENCIES)


sums_by_triton = kernel_op(
    "cauchy_triton", Cauchy, Sums,
    lambda given, keep: [Memory((*given.weights.shape[:2], given.around.shape[1]), given.around.dtype)],
    _forward, _adjoint, plain=sums_by_torch,
    gradients=lambda given, kept, d, needs: [*map(like, given[:3]), NOTHING],
)  # fmt: skip


def _kernel(given: LowRank, *, fused: bool) -> Tensor:
    """Return K (d, length); `fused` selects the Triton kernels."""
    Lambda, P, B, C, dt, length = given
    if Lambda.numel() == 0:
        return (dt * C.sum(1).real)[:, None].repeat(1, length)
    C = C + _after(Lambda, P, C, dt, length).to(C.dtype)
    # both entries of each conjugate pair
    Lambda, P, B, C = (torch.cat([x, x.conj()], 1) for x in (Lambda, P, B, C))
    # weights of all sums over the state: the outer product of (C, P^*) and (B, P)
    left, right = torch.cat([C[:, None], P.mH], 1), torch.cat([B[:, None], P.mT], 1)
    weights = (left[:, :, None] * right[:, None]).flatten(1, 2)
    # the points halfway between the roots of unity, because the root 1 is a pole if Lambda or dt is zero; one
    # of each conjugate pair of points
    half = (length + 1) // 2
    steps = torch.arange(length, device=Lambda.device, dtype=in_double(dt).dtype)
    turn = torch.polar(torch.ones_like(steps), torch.pi * steps / length)
    z = torch.polar(torch.ones_like(steps[:half]), -torch.pi * (2 * steps[:half] + 1) / length)
    turn, z = turn.to(Lambda.dtype), z.to(Lambda.dtype)
    # torch processes as many points at a time as need the memory of four kernels
    at_once = half if fused else max(1, 4 * length // Lambda.shape[1])
    run: Callable[..., Tensor] = _spectrum if fused else checkpointed(_spectrum)
    sums_of = sums_by_triton if fused else sums_by_torch
    spectrum = torch.cat([run(weights, Lambda, dt, some, sums_of) for some in z.split(at_once)], -1)
    spectrum = torch.cat([spectrum, spectrum[:, : length // 2].conj().flip(-1)], -1)
    # inverse transform of K_l exp(-i pi l / length)
    return (turn * torch.fft.ifft(spectrum)).real


def _spectrum(
    weights: Tensor, Lambda: Tensor, dt: Tensor, z: Tensor, sums_of: Callable[[Cauchy], Sums]
) -> Tensor:
    """Return dt C ((1 - z) I - dt (1 + z) A / 2)^-1 B for all z, (d, z)."""
    around = dt[:, None] / 2 * (1 + z)
    rank = round(weights.shape[1] ** 0.5) - 1
    sums = sums_of(Cauchy(weights, Lambda, around, 1 - z)).sums
    sums = sums.unflatten(1, (1 + rank, 1 + rank)).movedim(-1, 1)
    inner = torch.eye(rank, dtype=z.dtype, device=z.device) + around[..., None, None] * sums[..., 1:, 1:]
    # Woodbury's correction for the low rank
    change = sums[..., :1, 1:] @ torch.linalg.solve(inner, sums[..., 1:, :1])
    return dt[:, None] * (sums[..., 0, 0] - around * change[..., 0, 0])


def _after(Lambda: Tensor, P: Tensor, C: Tensor, dt: Tensor, length: int) -> Tensor:
    """Return C Abar^length for one entry of each conjugate pair, (d, n), computed with real states."""
    Lambda, P, C = map(in_double, (Lambda, P, C))
    # P^* x summed over a pair is twice the real part of an entry
    P = torch.cat([P.real, P.imag], 1)
    A = dt.to(P.dtype)[:, None, None] / 2 * (turning(Lambda) - 2 * P @ P.mT)
    identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    Abar = torch.linalg.solve(identity - A, identity + A)
    row = torch.cat([C.real, -C.imag], 1)[:, None] @ torch.linalg.matrix_power(Abar, length)
    after_real, after_imag = row[:, 0].chunk(2, 1)
    return torch.complex(after_real, -after_imag)


def turning(a: Tensor) -> Tensor:
    """Return matrices (d, 2 n, 2 n) that multiply states, given as (real, imaginary), by a (d, n)."""
    real, imaginary = torch.diag_embed(a.real), torch.diag_embed(a.imag)
    return torch.cat([torch.cat([real, -imaginary], -1), torch.cat([imaginary, real], -1)], -2)


BACKENDS = (
    Backend("convolution", "triton", partial(_kernel, fused=True), "the matrix is formed in registers"),
    Backend("convolution", "torch", partial(_kernel, fused=False), "the matrix is formed in parts"),
)
_TENSORS = checks.tensor_fields(LowRank)


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
    """Return the kernel of a diagonal plus low-rank state-space model, after the bilinear transform.

        K_dl = C Abar^l Bbar    x' = (diag(Lambda) - P P^*) x + B u

    Each entry represents a conjugate pair, with its rows of P, B and C; the sums are over both. The kernel is
    the inverse Fourier transform of its spectrum at z = exp(-pi i (2 k + 1) / length), which never is 1:

        C (I + Abar^length) (I - z Abar)^-1 Bbar

    By Woodbury's identity, the spectrum follows from products of (1 + r)^2 vectors with a Cauchy-like matrix
    of entries 1 / ((1 - z) - dt (1 + z) lambda / 2). Torch computes the spectrum for some z at a time, and
    again for the gradients, so that (d, n, length) numbers are never in memory. The Triton kernels form the
    matrix in registers. Abar^length comes from repeated squaring in double precision.

    `"auto"` uses Triton on CUDA, else torch.

    Args:
        Lambda: diagonal (d, n), complex64 or complex128, with real parts <= 0.
        P: (d, n, r), factors of the low-rank part, in the dtype of `Lambda`, like B and C.
        B: input weights (d, n).
        C: output weights (d, n).
        dt: step sizes (d,), real, >= 0. Values are checked on the CPU only, because reading them would wait
            for the device; under torch.compile they are not checked.
        length: number of taps, at least 1.
        backend: "auto", "torch" or "triton".

    Returns:
        K (d, length), real.

    Raises:
        TypeError: a dtype is not complex, or precisions differ.
        ValueError: shapes do not match, values are out of range, `length` is below 1, or `backend` is unknown
            or cannot run here.

    Source:
        S4 (Gu, Goel and Ré, 2022), theorem 3 and its appendix on the convolution kernel; -P P^* is the stable
        form of SaShiMi (Goel, Gu, Donahue and Ré, 2022).

    Example:
        >>> import torch
        >>> Lambda, one = torch.tensor([[-1.0 + 0j]]), torch.ones(1, 1, dtype=torch.complex64)
        >>> cauchy_kernel(Lambda, 0 * one[..., None], one, one / 2, torch.ones(1), 3)
        tensor([[0.6667, 0.2222, 0.0741]])
    """
    given = LowRank(Lambda, P, B, C, dt, length)
    checks.check_tensors(given, _TENSORS, "Lambda")
    checks.check_axes("Lambda", Lambda, "(d, n)", "Pass the eigenvalues of every channel.")
    kind, d, n = Lambda.dtype, *Lambda.shape
    checks.check_dtype("Lambda", Lambda, [*COMPLEX.values()])
    cure, beside = "Pass as many as `Lambda` has.", f" beside `Lambda` in {checks.name_of(kind)}"
    of_n = ("(d, n)", (d, n))
    expected = {"P": ("(d, n, r)", (d, n, "r")), "B": of_n, "C": of_n, "dt": ("(d,)", (d,))}
    for name, (axes, shape) in expected.items():
        x = getattr(given, name)
        checks.check_shape(name, x, axes, shape, cure)
        checks.check_dtype(name, x, [real_dtype(kind) if name == "dt" else kind], beside)
    checks.check_rates("Lambda", Lambda)
    checks.check_steps("dt", dt)
    return made_by("cauchy_kernel", BACKENDS, given, backend)
