"""The basis functions of HiPPO states."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from linrec.hippo.measures import Measure, check
from linrec.ops.core.checks import are_tensors

__all__ = ["basis"]


def basis(measure: Measure, N: int, s: Float[Tensor, "points"]) -> Float[Tensor, "points N"]:
    """Return the basis F_n(s) that reconstructs the past from a state: u(t - s) ~ sum_n x_n(t) F_n(s).

    | measure | F_n(s) | s |
    |---|---|---|
    | "legs" | r_n P_n(2 e^-s - 1) | from 0 to infinity |
    | "legt" | r_n P_n(1 - 2 s) | from 0 to 1 |
    | "lagt" | e^(-s/2) L_n(s) | from 0 to infinity |
    | "fout" | 1, sqrt(2) cos(2 pi s), sqrt(2) sin(2 pi s), .. | from 0 to 1 |

    The functions are orthonormal over this range of s, for "legs" with the weight e^-s.

    Args:
        measure: as in `linrec.hippo.matrices`.
        N: number of functions.
        s: (points,), age of the signal, in the units of `matrices`.

    Returns:
        F (points, N) in the dtype of `s`.

    Raises:
        ValueError: the measure is unknown, or `N` is below 1.

    Source:
        As for `linrec.hippo.matrices`.

    Example:
        A mean and a slope over the window:

        >>> import torch
        >>> basis("legt", 2, torch.tensor([0.0, 0.5, 1.0])).round(decimals=3)
        tensor([[ 1.0000,  1.7320],
                [ 1.0000,  0.0000],
                [ 1.0000, -1.7320]])
    """
    check(measure, N)
    are_tensors(s=s)
    if measure == "legs":
        functions = _legendre(2 * torch.exp(-s) - 1, N)
    elif measure == "legt":
        functions = _legendre(1 - 2 * s, N)
    elif measure == "lagt":
        functions = _laguerre(s, N)
    else:
        functions = _fourier(s, N)
    return torch.stack(functions, -1)


def _legendre(z: Tensor, N: int) -> list[Tensor]:
    """Return r_n P_n(z), by (n + 1) P_{n+1} = (2n + 1) z P_n - n P_{n-1}."""
    P = [torch.ones_like(z), z]
    for n in range(1, N - 1):
        P.append(((2 * n + 1) * z * P[n] - n * P[n - 1]) / (n + 1))
    return [math.sqrt(2 * n + 1) * P_n for n, P_n in enumerate(P[:N])]


def _laguerre(s: Tensor, N: int) -> list[Tensor]:
    """Return e^(-s/2) L_n(s), by (n + 1) L_{n+1} = (2n + 1 - s) L_n - n L_{n-1}."""
    # the recurrence includes the exponential, because the polynomials alone overflow for large s
    L = [torch.exp(-s / 2), (1 - s) * torch.exp(-s / 2)]
    for n in range(1, N - 1):
        L.append(((2 * n + 1 - s) * L[n] - n * L[n - 1]) / (n + 1))
    return L[:N]


def _fourier(s: Tensor, N: int) -> list[Tensor]:
    F = [torch.ones_like(s)]
    for m in range(1, (N + 1) // 2):
        F += [2**0.5 * torch.cos(math.tau * m * s), 2**0.5 * torch.sin(math.tau * m * s)]
    # for even N the last coordinate has no basis function
    return F if N % 2 else [*F, torch.zeros_like(s)]
