"""State-space models from continuous to discrete time: diagonal, and diagonal plus low rank."""

from typing import Literal, TypeAlias

import torch
from jaxtyping import Complex, Float, Inexact
from torch import Tensor

from linrec.errors import unknown
from linrec.ops.core.checks import check_rates, check_steps
from linrec.ops.core.precision import real_dtype

Discretization: TypeAlias = Literal["zoh", "bilinear", "euler", "softmax"]
DISCRETIZATIONS: tuple[Discretization, ...] = ("zoh", "bilinear", "euler", "softmax")

# of dt A, where (exp(dt A) - 1) / (dt A) is a power series
SMALL = 0.5
# terms after which the series and its derivative are exact to rounding there, in single and double precision
TERMS = 9, 16

# of the reciprocal in "softmax", which is without bound where a^L is one
EPSILON = 1e-7


def discretize_diagonal(
    A: Inexact[Tensor, "..."],
    B: Inexact[Tensor, "..."],
    dt: Float[Tensor, "..."] | float,
    method: Discretization = "zoh",
    *,
    length: int | None = None,
) -> tuple[Inexact[Tensor, "..."], Inexact[Tensor, "..."]]:
    """Discretise x' = A x + B u, A diagonal, in steps of dt.

        x_t = a * x_{t-1} + b u_t

    | method | a | b | |
    |---|---|---|---|
    | "zoh" | exp(dt A) | (exp(dt A) - 1) / A * B | exact for an input that is held during the step |
    | "bilinear" | (1 + dt A / 2) / (1 - dt A / 2) | dt B / (1 - dt A / 2) | |
    | "euler" | 1 + dt A | dt B | unstable where abs(1 + dt A) > 1 |
    | "softmax" | exp(dt A) | that of "zoh" over exp(L dt A) - 1 | DSS, for kernels of L steps |

    The first two keep a stable system stable with any dt. With the last, the L taps b a^l of an entry of the
    state are B / A times a softmax over l of dt A l, whatever the real part of A; where that is positive,
    states of long sequences grow.

    Args:
        A: diagonal, any shape, real or complex, with real parts <= 0, but for "softmax".
        B: factors of the input, which broadcast with A.
        dt: step size in A's unit of time, real, a number > 0 or a tensor >= 0 that broadcasts with A. Values
            of tensors are looked at on the CPU; elsewhere, and under torch.compile, that would mean waiting.
        method: "zoh", "bilinear", "euler" or "softmax".
        length: L, for "softmax" alone.

    Returns:
        a and b, of the shape that all broadcast to, differentiable in all; A = 0 is a value like any other,
        but with "softmax".

    Raises:
        ValueError: an unknown method; a step or a real part out of range; "softmax" without its length, or
            another method with one.

    Source:
        S4D (Gu, Gupta, Goel and Ré, 2022), section on discretisation; "softmax" is DSS (Gupta, Gu and Berant,
        2022), proposition 1, with its regularised reciprocal.

    Example:
        >>> import torch
        >>> A, B = torch.tensor([-1.0, 0.0]), torch.ones(2)
        >>> for method in ("zoh", "bilinear", "euler"):
        ...     a, b = discretize_diagonal(A, B, 0.5, method)
        ...     print([round(x, 3) for x in a.tolist()], [round(x, 3) for x in b.tolist()])
        [0.607, 1.0] [0.393, 0.5]
        [0.6, 1.0] [0.4, 0.5]
        [0.5, 1.0] [0.5, 0.5]
    """
    if method not in DISCRETIZATIONS:
        raise unknown("discretization", method, DISCRETIZATIONS)
    if (method == "softmax") != (length is not None) or (length is not None and length < 1):
        raise ValueError(
            f'`length` must be the steps of the kernel, at least 1, with `method="softmax"`, else None; '
            f"got {length} with {method!r}."
        )
    if isinstance(dt, Tensor):
        check_steps("dt", dt)
    elif not dt > 0:
        raise ValueError(f"`dt` must be a positive time; got {dt}. A step of zero never moves.")
    if method != "softmax":
        check_rates("A", A)
    z = dt * A
    if method == "bilinear":
        return (1 + z / 2) / (1 - z / 2), dt * B / (1 - z / 2)
    if method == "euler":
        return 1 + z, dt * B
    if length is not None:
        a, b, growth = softmax_factors(A, B, dt, length)
        return a * torch.exp(growth), b * torch.exp(-growth * (length - 1))
    a = torch.exp(z)
    return a, _held(z, A, dt, a, 1) * B


def softmax_factors(A: Tensor, B: Tensor, dt: Tensor | float, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a, b and g >= 0 whose taps b a^l exp(g (l - L + 1)) are those of "softmax": none is too large.

    Where the real part of A is positive, |a| = 1, and g = 0 elsewhere.
    """
    z = dt * A
    grows = z.real > 0
    growth = torch.where(grows, z.real, 0)
    a = torch.exp(z - growth)
    fading = torch.where(grows, -length * z, length * z)
    over = torch.expm1(fading)
    reciprocal = over.conj() / (over.abs().square() + EPSILON)
    # 1 / (exp(L z) - 1) = -exp(-L z) / (exp(-L z) - 1), whose magnitude is in g, but for that of one step
    turn = torch.exp(-1j * length * z.imag) if z.is_complex() else torch.ones_like(z)
    b = _held(z, A, dt, a, torch.exp(-growth)) * B * torch.where(grows, -turn, 1) * reciprocal
    return a, b, growth


def _held(z: Tensor, A: Tensor, dt: Tensor | float, a: Tensor, scale: Tensor | int) -> Tensor:
    """(exp(z) - 1) / A times a scale, of which `a` is the part of exp(z)."""
    # the difference has few digits near zero, and its gradient fewer still
    small = z.abs() < SMALL
    series = scale * dt * _series(torch.where(small, z, 0))
    return torch.where(small, series, (a - scale) / torch.where(small, 1, A))


def _series(z: Tensor) -> Tensor:
    """(exp(z) - 1) / z = sum_k z^k / (k + 1)!, for |z| < `SMALL`."""
    total = torch.ones_like(z)
    for k in range(TERMS[real_dtype(z.dtype) == torch.float64], 1, -1):
        total = 1 + total * z / k
    return total


Factors = tuple[
    Complex[Tensor, "d n"], Complex[Tensor, "d n r"], Complex[Tensor, "d n r"], Complex[Tensor, "d n"]
]


def bilinear_low_rank(
    Lambda: Complex[Tensor, "d n"],
    P: Complex[Tensor, "d n r"],
    B: Complex[Tensor, "d n"],
    dt: Float[Tensor, "d"],
) -> Factors:
    """Return a, p, q and b of Abar = diag(a) - p q^T and Bbar = b, for A = diag(Lambda) - P P^*.

        Abar = (I - dt/2 A)^-1 (I + dt/2 A)     Bbar = (I - dt/2 A)^-1 dt B

    Every entry stands for a conjugate pair. With E = I - dt/2 diag(Lambda), Woodbury's identity has

        (I - dt/2 A)^-1 = E^-1 - E^-1 P (2/dt I + P^* E^-1 P)^-1 P^* E^-1     Abar = 2 (I - dt/2 A)^-1 - I

    Args:
        Lambda: normal part of A (d, n), with negative real parts.
        P: low-rank part of A (d, n, r).
        B: factors of the input (d, n).
        dt: step sizes (d,).

    Source:
        S4 (Gu, Goel and Ré, 2022), its recurrence of A in this form.

    Example:
        >>> Lambda, P, B = (torch.full((1, 2), x, dtype=torch.cfloat) for x in (-1.0, 0.0, 1.0))
        >>> a, p, q, b = bilinear_low_rank(Lambda, P[..., None], B, torch.tensor([2.0]))
        >>> a.real.tolist(), b.real.tolist()
        ([[0.0, 0.0]], [[1.0, 1.0]])
    """
    a, b = discretize_diagonal(Lambda, B, dt[:, None], "bilinear")
    left, right = (x / (1 - dt[:, None, None] / 2 * Lambda[..., None]) for x in (P, P.conj()))
    # P^* x of both entries of a pair is twice the real part of one
    inner = 2 * (P.conj()[..., None] * left[:, :, None]).sum(1).real
    inner = inner + torch.diag_embed((2 / dt)[:, None].expand(-1, P.shape[-1]))
    # the inverse on the right of E^-1 P, by a sum that autocast does not round
    left = (left[..., None] * torch.linalg.inv_ex(inner).inverse[:, None]).sum(-2)
    b = b - dt[:, None] * (left * 2 * (right * B[..., None]).sum(1, keepdim=True).real).sum(-1)
    return a, 2 * left, 2 * right, b
