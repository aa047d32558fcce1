"""HiPPO's matrices in a basis where they are diagonal and a low rank, or diagonal alone."""

from typing import NamedTuple

import torch
from jaxtyping import Complex
from torch import Tensor

from linrec.hippo.measures import Measure, low_rank, matrices

__all__ = ["Diagonal", "NormalPlusLowRank", "diagonal", "normal_plus_low_rank"]


class NormalPlusLowRank(NamedTuple):
    """A = V (diag(Lambda) - P P^*) V^*, in complex128; the state is x = V z.

    Args:
        Lambda: (M,), eigenvalues of the normal part.
        P: (M, rank).
        B: (M,), what the input is multiplied by in z' = (diag(Lambda) - P P^*) z + B u.
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
        B: (M,), what the input is multiplied by.
        V: (N, M), eigenvectors.
    """

    Lambda: Complex[Tensor, "M"]
    B: Complex[Tensor, "M"]
    V: Complex[Tensor, "N M"]


def normal_plus_low_rank(measure: Measure, N: int, *, pairs: bool = True) -> NormalPlusLowRank:
    """Write A as a normal matrix minus one of low rank, both in the normal one's eigenvectors.

        A = V (diag(Lambda) - P P^*) V^*,    V^* V = I

    | measure | real part of Lambda | rank |
    |---|---|---|
    | "legs" | -1/2 | 1 |
    | "legt" | 0 | 2 |
    | "lagt" | 0 | 1 |
    | "fout" | 0; the imaginary ones are multiples of 2 pi | 1 |

    Eigenvalues are conjugate pairs, and so are the rest. With `pairs`, one of each is kept, that with the
    positive imaginary part, M = N / 2: then x = 2 Re(V z) and P^* z means 2 Re(P^* z). Eigenvalues are in the
    order of their imaginary parts, and eigenvectors are turned such that B is real and not negative: both are
    the same on every machine.

    Args:
        measure: as for `linrec.hippo.matrices`.
        N: coefficients of the real state; even with `pairs`.
        pairs: whether one of each conjugate pair is kept, or both, M = N.

    Returns:
        Lambda (M,), P (M, rank), B (M,) and V (N, M) in complex128.

    Raises:
        ValueError: an unknown measure, an `N` below 1, or an odd one with `pairs`.

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
    if pairs and N % 2:
        raise ValueError(
            f"`N` must be even for conjugate pairs to be kept once; got {N}. "
            f"Pass {N + 1}, or `pairs=False` for all eigenvalues."
        )
    P = low_rank(measure, N)
    skew = (A - A.mT) / 2
    coupled = skew
    if measure == "fout" and N % 2 == 0:
        # the constant and the coordinate without a function both stand still: a pair, once they are coupled
        coupled = skew.clone()
        coupled[0, -1], coupled[-1, 0] = -1, 1
    # -i times a real skew-symmetric matrix is Hermitian, whose eigenvectors are orthonormal to rounding
    _, V = torch.linalg.eigh(-1j * coupled)
    V = V[:, N // 2 :] if pairs else V
    V = V * torch.sgn(V.mH @ B.to(V.dtype))
    frequency = (V.conj() * (skew.to(V.dtype) @ V)).sum(0).imag
    # exact, for a rounding error above zero would grow
    decay = torch.full_like(frequency, -0.5 if measure == "legs" else 0.0)
    Lambda = torch.complex(decay, frequency)
    return NormalPlusLowRank(Lambda, V.mH @ P.to(V.dtype), V.mH @ B.to(V.dtype), V)


def diagonal(measure: Measure, N: int, *, pairs: bool = True) -> Diagonal:
    """The normal part alone: A + P P^* = V diag(Lambda) V^*.

    Of "legs", it is what S4D-LegS and S5 start from, and more than a part: with B / 2 in place of B, what it
    makes of an input tends to what A and B make of it, for large N. The parts of the others have no decay.

    Args:
        measure: as for `linrec.hippo.matrices`.
        N: coefficients of the real state; even with `pairs`.
        pairs: whether one of each conjugate pair is kept, M = N / 2, or both, M = N; see
            `normal_plus_low_rank`.

    Returns:
        Lambda (M,), B (M,), which is not halved, and V (N, M) in complex128.

    Raises:
        ValueError: an unknown measure, an `N` below 1, or an odd one with `pairs`.

    Source:
        S4D (Gu, Gupta, Goel and Ré, On the Parameterization and Initialization of Diagonal State Space
        Models, 2022), theorem on S4D-LegS.

    Example:
        >>> diagonal("fout", 6).Lambda.imag.round(decimals=3).tolist()
        [0.0, 6.283, 12.566]
    """
    Lambda, _, B, V = normal_plus_low_rank(measure, N, pairs=pairs)
    return Diagonal(Lambda, B, V)
