"""HiPPO-LegS over the whole past: a step of x' = (A x + B u) / t in O(N) operations."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from linrec.ops.scan import scan

__all__ = ["scaled_step"]


def scaled_step(
    x: Float[Tensor, "b c N"], u: Float[Tensor, "b c"], steps: Float[Tensor, "b"]
) -> Float[Tensor, "b c N"]:
    """Update the coefficients of the whole past with a sample, by the bilinear rule with a step of 1 / k.

        x_k = (I - A / 2k)^-1 ((I + A / 2k) x_{k-1} + B u_k / k)

    A is the matrix of "legs" in `linrec.hippo.matrices`. Below its diagonal A has rank 1, so a product with A
    is a cumulative sum, and solving a linear system is a scan over the coefficients. The first sample gives a
    constant: x_0 = (u, 0, .., 0).

    Args:
        x: coefficients (b, c, N) of c signals.
        u: the next samples (b, c).
        steps: (b,), number k of samples that x already contains; rows may differ.

    Returns:
        The coefficients after the sample (b, c, N).

    Source:
        HiPPO (Gu, Dao, Ermon, Rudra and Ré, 2020), the update of LegS in linear time; the first step is the
        released code's.
    """
    n = torch.arange(x.shape[-1], dtype=x.dtype, device=x.device)
    r = (2 * n + 1).sqrt()
    half = (0.5 / steps.clamp(min=1))[:, None, None]
    # A = diag(n) - r r^T on and below the diagonal
    right = x + half * (n * x - r * (r * x).cumsum(-1) + 2 * u[..., None] * r)
    # row n of the solution y needs the sum of r y over the rows before it, which is a recurrence over rows
    diagonal = 1 + half * (n + 1)
    a, added = (1 - half * n) / diagonal, r * right / diagonal
    total, _ = scan(a.mT, added.mT)
    before = functional.pad(total.mT, (1, 0))[..., :-1]
    y = (right - half * r * before) / diagonal
    first = functional.pad(u[..., None], (0, x.shape[-1] - 1))
    return torch.where((steps == 0)[:, None, None], first, y)
