"""HiPPO matrices in diagonal-plus-low-rank form, and in diagonal form."""

from typing import NamedTuple

import torch
from jaxtyping import Complex
from torch import Tensor

from linrec.hippo.measures import Measure, low_rank, matrices
from linrec.rules import typed

__all__ = ["Diagonal", "NormalPlusLowRank", "diagonal", "normal_plus_low_rank"]


class NormalPlusLowRank(NamedTuple):
    """A = V (diag(Lambda) - P P^*) V^*, in complex128; the state is x = V z.

    Args:
        Lambda: (M,), eigenvalues of the normal part.
        P: (M, rank).
        B: (M,), input weights in z' = (diag(Lambda) - P P^*) z + B u.
        V: (N, M), eigenvectors.
    """

    Lambda: Complex[Tensor, "M"]
    P: Complex[Tensor, "M rank"]
    B: Complex[Tensor, "M"]
    V: Complex[Tensor, "N M"]


class Diagonal(NamedTuple):
    """z' = Lambda * z + B u, in complex128; the state is x = V z.

    Args:
        Lambda: (M,), eigenvalues.
        B: (M,), input weights.
        V: (N, M), eigenvectors.
    """

    Lambda: Complex[Tensor, "M"]
    B: Complex[Tensor, "M"]
    V: Complex[Tensor, "N M"]


def normal_plus_low_rank(measure: Measure, N: int, *, pairs: bool = True) -> NormalPlusLowRank:
    """Return A as a normal matrix minus a low-rank matrix, both in the eigenbasis of the normal matrix.

        A = V (diag(Lambda) - P P^*) V^*,    V^* V = I

    | measure | real part of Lambda | rank |
    |---|---|---|
    | "legs" | -1/2 | 1 |
    | "legt" | 0 | 2 |
    | "lagt" | 0 | 1 |
    | "fout" | 0; imaginary parts are multiples of 2 pi | 1 |

    The eigenvalues form conjugate pairs, and so do the entries of P, B and V. With `pairs`, only the
    eigenvalue with positive imaginary part is kept, so M = N / 2; then x = 2 Re(V z), and P^* z means
    2 Re(P^* z). Eigenvalues are sorted by imaginary part, and eigenvectors are rotated such that B is real
    and not negative, so the result is the same on every machine.

    Args:
        measure: as in `linrec.hippo.matrices`.
        N: number of coefficients of the real state; even with `pairs`.
        pairs: whether to keep one eigenvalue of each conjugate pair, or both, M = N.

    Returns:
        Lambda (M,), P (M, rank), B (M,) and V (N, M) in complex128.

    Raises:
        ValueError: the measure is unknown, `N` is below 1, or `N` is odd with `pairs`.

    Source:
        S4 (Gu, Goel and Ré, 2021), theorem 1 and its appendix on HiPPO's matrices.

    Example:
        >>> import torch
        >>> Lambda, P, B, V = normal_plus_low_rank("legs", 4, pairs=False)
        >>> A = V @ (torch.diag(Lambda) - P @ P.mH) @ V.mH
        >>> bool(torch.allclose(A.real, matrices("legs", 4).A))
        True
    """
    A, B = matrices(measure, N)
    typed({"pairs": bool}, pairs=pairs)
    if pairs and N % 2:
        raise ValueError(
            f"`N` must be even to keep one of each conjugate pair; got {N}. "
            f"Pass {N + 1}, or `pairs=False` for all eigenvalues."
        )
    P = low_rank(measure, N)
    skew = (A - A.mT) / 2
    coupled = skew
    if measure == "fout" and N % 2 == 0:
        # the constant and the last, unused coordinate both have frequency 0; coupled, they form a pair
        coupled = skew.clone()
        coupled[0, -1], coupled[-1, 0] = -1, 1
    # -i times a real skew-symmetric matrix is Hermitian, so its eigenvectors are orthonormal up to rounding
    _, V = torch.linalg.eigh(-1j * coupled)
    V = V[:, N // 2 :] if pairs else V
    V = V * torch.sgn(V.mH @ B.to(V.dtype))
    frequency = (V.conj() * (skew.to(V.dtype) @ V)).sum(0).imag
    # set exactly, because a positive rounding error would make the state grow
    decay = torch.full_like(frequency, -0.5 if measure == "legs" else 0.0)
    Lambda = torch.complex(decay, frequency)
    return NormalPlusLowRank(Lambda, V.mH @ P.to(V.dtype), V.mH @ B.to(V.dtype), V)


def diagonal(measure: Measure, N: int, *, pairs: bool = True) -> Diagonal:
    """Return the normal part alone: A + P P^* = V diag(Lambda) V^*.

    The normal part of "legs" initialises S4D-LegS and S5. For large N, with B / 2 in place of B, its response
    to an input converges to the response of A and B. The normal parts of the other measures have no decay.

    Args:
        measure: as in `linrec.hippo.matrices`.
        N: number of coefficients of the real state; even with `pairs`.
        pairs: whether to keep one eigenvalue of each conjugate pair, M = N / 2, or both, M = N; see
            `normal_plus_low_rank`.

    Returns:
        Lambda (M,), B (M,), not halved, and V (N, M) in complex128.

    Raises:
        ValueError: the measure is unknown, `N` is below 1, or `N` is odd with `pairs`.

    Source:
        S4D (Gu, Gupta, Goel and Ré, On the Parameterization and Initialization of Diagonal State Space
        Models, 2022), theorem on S4D-LegS.

    Example:
        >>> diagonal("fout", 6).Lambda.imag.round(decimals=3).tolist()
        [0.0, 6.283, 12.566]
    """
    Lambda, _, B, V = normal_plus_low_rank(measure, N, pairs=pairs)
    return Diagonal(Lambda, B, V)
