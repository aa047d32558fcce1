"""HiPPO matrices: the state of x' = A x + B u encodes the past of u as coefficients of a basis."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from linrec.rules import COUNT, at_least, choice, typed

__all__ = ["MEASURES", "Measure", "StateSpace", "matrices"]

Measure = Literal["legs", "legt", "lagt", "fout"]


class StateSpace(NamedTuple):
    """A state-space system x' = A x + B u; once discretised, x_k = A x_{k-1} + B u_k.

    Args:
        A: (..., N, N), state matrix.
        B: (..., N), input weights.
    """

    A: Float[Tensor, "*steps N N"]
    B: Float[Tensor, "*steps N"]


def matrices(measure: Measure, N: int, *, dtype: torch.dtype = torch.float64) -> StateSpace:
    """Return A and B of x' = A x + B u, whose state encodes the past of u as coefficients of a basis.

        x_n(t) = int_0^inf u(t - s) K_n(s) ds,    K(s) = exp(s A) B

    | measure | A_nk, n > k | A_nn | A_nk, n < k | B_n | K_n(s) |
    |---|---|---|---|---|---|
    | "legs" | -r_n r_k | -(n + 1) | 0 | r_n | e^-s r_n P_n(2 e^-s - 1) |
    | "legt" | -r_n r_k | -r_n r_n | -(-1)^(n-k) r_n r_k | r_n | ~ r_n P_n(1 - 2 s) for s < 1, else 0 |
    | "lagt" | -1 | -1/2 | 0 | 1 | e^(-s/2) L_n(s) |
    | "fout" | D - 2 p p^T | | | 2 p_n | ~ F_n(s) for s < 1, else 0 |

    P_n are Legendre polynomials with r_n = sqrt(2n + 1), and L_n Laguerre polynomials. F_n are 1,
    sqrt(2) cos(2 pi s), sqrt(2) sin(2 pi s), sqrt(2) cos(4 pi s), .., with p = F(0), and D differentiates
    them: F' = D F. After the constant, the F_n come in pairs of cosine and sine. So for even N the last
    coordinate has no function and stays zero.

    The unit of time is the window for "legt" and "fout", and the time scale of e^-s or e^(-s/2) for the
    others. These systems are time-invariant. HiPPO's LegS is not: x' = (A x + B u) / t, with the same
    matrices, weighs the whole past equally. In the variable log t it is the system above.

    Args:
        measure: the weight of the past, which determines the orthonormal basis.
        N: number of coefficients.
        dtype: dtype of the result, which is computed in float64.

    Returns:
        A (N, N) and B (N,).

    Raises:
        ValueError: the measure is unknown, or `N` is below 1.

    Source:
        HiPPO (Gu, Dao, Ermon, Rudra and Ré, 2020), LegS, LegT and LagT, with the orthonormal bases; LagT in
        the form of S4 (Gu, Goel and Ré, 2021), where the basis is Laguerre functions. How to Train Your
        HiPPO (Gu, Johnson, Timalsina, Rudra and Ré, 2022), FouT.

    Example:
        >>> A, B = matrices("lagt", 3)
        >>> A.tolist(), B.tolist()
        ([[-0.5, 0.0, 0.0], [-1.0, -0.5, 0.0], [-1.0, -1.0, -0.5]], [1.0, 1.0, 1.0])
    """
    check(measure, N)
    A, B = _MATRICES[measure](N)
    return StateSpace(A.to(dtype), B.to(dtype))


def low_rank(measure: Measure, N: int) -> Float[Tensor, "N rank"]:
    """Return P in float64 such that A + P P^T is normal: -mu I plus a skew-symmetric matrix, mu >= 0."""
    _, B = matrices(measure, N)
    if measure == "legt":
        # the symmetric part of A couples only coefficients of equal parity
        even = torch.arange(N) % 2 == 0
        return torch.stack([B * even, B * ~even], 1)
    return (B / 2**0.5)[:, None]


def check(measure: str, N: int) -> None:
    """Raise if the measure is unknown, N is below 1, or the matrices are too large to decompose."""
    choice(MEASURES, measure=measure)
    typed({"N": int}, N=N)
    at_least(1, most=COUNT, N=N)


def _legs(N: int) -> StateSpace:
    r = _roots(N)
    # the diagonal of A is -(n + 1) = n - (2n + 1), and (r**2 - 1) / 2 = n
    return StateSpace(torch.diag((r**2 - 1) / 2) - torch.outer(r, r).tril(), r)


def _legt(N: int) -> StateSpace:
    r, n = _roots(N), torch.arange(N)
    odd = (n[:, None] - n) % 2 == 1
    sign = torch.where(odd.triu(), -1.0, 1.0).double()
    return StateSpace(-torch.outer(r, r) * sign, r)


def _lagt(N: int) -> StateSpace:
    ones = torch.ones(N, dtype=torch.float64)
    return StateSpace(torch.diag(ones / 2) - torch.outer(ones, ones).tril(), ones)


def _fout(N: int) -> StateSpace:
    # p = F(0): 1, then sqrt(2) for cosines, which have odd indices
    p = torch.zeros(N, dtype=torch.float64)
    p[0] = 1
    p[1 : N - 1 : 2] = 2**0.5
    frequency = 2 * torch.pi * torch.arange(1, (N + 1) // 2, dtype=torch.float64)
    above = torch.zeros(N - 1, dtype=torch.float64)
    above[1 : N - 1 : 2] = frequency
    # cos' = -frequency sin, an entry above the diagonal; sin' = frequency cos, an entry below
    D = torch.diag(above, -1) - torch.diag(above, 1)
    return StateSpace(D - 2 * torch.outer(p, p), 2 * p)


def _roots(N: int) -> Tensor:
    return (2 * torch.arange(N, dtype=torch.float64) + 1).sqrt()


_MATRICES: dict[str, Callable[[int], StateSpace]] = {
    "legs": _legs,
    "legt": _legt,
    "lagt": _lagt,
    "fout": _fout,
}
MEASURES: tuple[Measure, ...] = ("legs", "legt", "lagt", "fout")
