"""The bilinear transform of a matrix that is diagonal plus low rank, which is of that form again."""

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from linrec.ops.long_conv import discretize_diagonal

__all__ = ["bilinear_low_rank"]

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
