"""Discretisation of state-space models: diagonal, and diagonal plus low rank."""

from typing import Literal, TypeAlias

import torch
from jaxtyping import Complex, Float, Inexact
from torch import Tensor

from linrec.ops.core.checks import are_tensors, check_rates, check_steps
from linrec.ops.core.precision import real_dtype
from linrec.rules import choice, positive, typed

Discretization: TypeAlias = Literal["zoh", "bilinear", "euler", "softmax"]
DISCRETIZATIONS: tuple[Discretization, ...] = ("zoh", "bilinear", "euler", "softmax")

# for |dt A| below this, (exp(dt A) - 1) / (dt A) is computed as a power series
SMALL = 0.5
# number of terms for which the series and its derivative are exact to rounding, in single and double
# precision
TERMS, TERMS_DOUBLE = 9, 16

# regularises the reciprocal of "softmax", which is unbounded where a^L = 1
EPSILON = 1e-7


def discretize_diagonal(
    A: Inexact[Tensor, "..."],
    B: Inexact[Tensor, "..."],
    dt: Float[Tensor, "..."] | float,
    method: Discretization = "zoh",
    *,
    length: int | None = None,
) -> tuple[Inexact[Tensor, "..."], Inexact[Tensor, "..."]]:
    """Return a and b of the discretised system x' = A x + B u, A diagonal, for steps of dt.

        x_t = a * x_{t-1} + b u_t

    | method | a | b | |
    |---|---|---|---|
    | "zoh" | exp(dt A) | (exp(dt A) - 1) / A * B | exact for an input that is constant during each step |
    | "bilinear" | (1 + dt A / 2) / (1 - dt A / 2) | dt B / (1 - dt A / 2) | |
    | "euler" | 1 + dt A | dt B | unstable where abs(1 + dt A) > 1 |
    | "softmax" | exp(dt A) | b of "zoh" over exp(L dt A) - 1 | DSS, for kernels of L steps |

    With "zoh" and "bilinear" a stable system stays stable for any dt. With "softmax", the L taps b a^l of an
    entry of the state are B / A times a softmax over l of dt A l, for any real part of A. If the real part
    is positive, states of long sequences grow.

    Args:
        A: diagonal, any shape, real or complex, with real parts <= 0 (except for "softmax").
        B: input weights, which broadcast with A.
        dt: step size in A's unit of time, real: a number > 0, or a tensor >= 0 that broadcasts with A. Values
            of tensors are checked on the CPU only, because reading them would wait for the device; under
            torch.compile they are not checked.
        method: "zoh", "bilinear", "euler" or "softmax".
        length: L, only for "softmax".

    Returns:
        a and b, of the broadcast shape, differentiable in all arguments. A = 0 is allowed, except for
        "softmax".

    Raises:
        ValueError: the method is unknown; a step size or a real part is out of range; `length` is missing for
            "softmax", or given for another method.

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
    choice(DISCRETIZATIONS, method=method)
    typed({"length": int | None}, length=length)
    are_tensors(A=A, B=B)
    if (method == "softmax") != (length is not None) or (length is not None and length < 1):
        raise ValueError(
            f'`length` must be the number of taps, at least 1, with `method="softmax"`, else None; '
            f"got {length} with {method!r}."
        )
    if isinstance(dt, Tensor):
        check_steps("dt", dt)
    else:
        typed({"dt": float}, dt=dt)
        positive(dt=dt, cure="A step of zero never moves.")
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
    """Return a, b and g >= 0 such that the taps of "softmax" are b a^l exp(g (l - L + 1)), without overflow.

    Where the real part of A is positive, |a| = 1; elsewhere g = 0.
    """
    z = dt * A
    grows = z.real > 0
    growth = torch.where(grows, z.real, 0)
    a = torch.exp(z - growth)
    fading = torch.where(grows, -length * z, length * z)
    over = torch.expm1(fading)
    reciprocal = over.conj() / (over.abs().square() + EPSILON)
    # 1 / (exp(L z) - 1) = -exp(-L z) / (exp(-L z) - 1); g contains its magnitude, except for a single step
    turn = torch.exp(-1j * length * z.imag) if z.is_complex() else torch.ones_like(z)
    b = _held(z, A, dt, a, torch.exp(-growth)) * B * torch.where(grows, -turn, 1) * reciprocal
    return a, b, growth


def _held(z: Tensor, A: Tensor, dt: Tensor | float, a: Tensor, scale: Tensor | int) -> Tensor:
    """Return (exp(z) - 1) / A times a scale; `a` is exp(z) times that scale."""
    # the difference loses digits near zero, and its gradient even more
    small = z.abs() < SMALL
    series = scale * dt * _series(torch.where(small, z, 0))
    return torch.where(small, series, (a - scale) / torch.where(small, 1, A))


def _series(z: Tensor) -> Tensor:
    """Return (exp(z) - 1) / z = sum_k z^k / (k + 1)!, for |z| < `SMALL`."""
    total = torch.ones_like(z)
    terms = TERMS_DOUBLE if real_dtype(z.dtype) == torch.float64 else TERMS
    for k in range(terms, 1, -1):
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

    Every entry represents a conjugate pair. With E = I - dt/2 diag(Lambda), Woodbury's identity gives

        (I - dt/2 A)^-1 = E^-1 - E^-1 P (2/dt I + P^* E^-1 P)^-1 P^* E^-1     Abar = 2 (I - dt/2 A)^-1 - I

    Args:
        Lambda: normal part of A (d, n), with negative real parts.
        P: low-rank part of A (d, n, r).
        B: input weights (d, n).
        dt: step sizes (d,).

    Source:
        S4 (Gu, Goel and Ré, 2022), the recurrence for A in this form.
    """
    a, b = discretize_diagonal(Lambda, B, dt[:, None], "bilinear")
    left, right = (x / (1 - dt[:, None, None] / 2 * Lambda[..., None]) for x in (P, P.conj()))
    # P^* x summed over a pair is twice the real part of an entry
    inner = 2 * (P.conj()[..., None] * left[:, :, None]).sum(1).real
    inner = inner + torch.diag_embed((2 / dt)[:, None].expand(-1, P.shape[-1]))
    # E^-1 P times the inverse, as an explicit sum, which autocast does not round
    left = (left[..., None] * torch.linalg.inv_ex(inner).inverse[:, None]).sum(-2)
    b = b - dt[:, None] * (left * 2 * (right * B[..., None]).sum(1, keepdim=True).real).sum(-1)
    return a, 2 * left, 2 * right, b
