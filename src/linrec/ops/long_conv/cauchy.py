"""The kernel of a state-space model that is diagonal plus low rank, from its spectrum."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def kernel_of_low_rank(Lambda: Tensor, P: Tensor, B: Tensor, C: Tensor, dt: Tensor, length: int) -> Tensor:
    """Return K (d, length); arguments as those of `cauchy_kernel`."""
    # both of each conjugate pair
    Lambda, P, B, C = (torch.cat([x, x.conj()], 1) for x in (Lambda, P, B, C))
    C = C - _after(Lambda, P, C, dt, length).to(C.dtype)
    # all that the sums over the state are weighted with: (C, P^*) times (B, P)
    left = torch.cat([C[:, None], P.mH], 1)
    right = torch.cat([B[:, None], P.mT], 1)
    weights = (left[:, :, None] * right[:, None]).flatten(1, 2)
    # those of a real kernel's frequencies that are not the conjugates of others
    k = torch.arange(length // 2 + 1, device=Lambda.device, dtype=torch.float64)
    z = torch.polar(torch.ones_like(k), -2 * torch.pi * k / length).to(Lambda.dtype)
    # as many at a time as make four kernels
    at_once = max(1, 4 * length // Lambda.shape[1])
    spectra = [
        checkpoint(_spectrum, weights, Lambda, dt, some, use_reentrant=False) for some in z.split(at_once)
    ]
    return torch.fft.irfft(torch.cat(spectra, -1), length)


def _spectrum(weights: Tensor, Lambda: Tensor, dt: Tensor, z: Tensor) -> Tensor:
    """dt C ((1 - z) I - dt (1 + z) A / 2)^-1 B at all z, (d, z)."""
    around = dt[:, None] / 2 * (1 + z)
    cauchy = 1 / ((1 - z) - Lambda[..., None] * around[:, None])
    rank = round(weights.shape[1] ** 0.5) - 1
    sums = (weights @ cauchy).unflatten(1, (1 + rank, 1 + rank)).movedim(-1, 1)
    inner = torch.eye(rank, dtype=z.dtype, device=z.device) + around[..., None, None] * sums[..., 1:, 1:]
    # what the low rank changes
    change = sums[..., :1, 1:] @ torch.linalg.solve(inner, sums[..., 1:, :1])
    return dt[:, None] * (sums[..., 0, 0] - around * change[..., 0, 0])


def _after(Lambda: Tensor, P: Tensor, C: Tensor, dt: Tensor, length: int) -> Tensor:
    """C Abar^length, (d, n)."""
    wide = Lambda.dtype if Lambda.device.type == "mps" else torch.complex128
    Lambda, P, C, half = Lambda.to(wide), P.to(wide), C.to(wide), dt.to(wide)[:, None, None] / 2
    A = half * (torch.diag_embed(Lambda) - P @ P.mH)
    identity = torch.eye(A.shape[-1], dtype=wide, device=A.device)
    Abar = torch.linalg.solve(identity - A, identity + A)
    return (C[:, None] @ torch.linalg.matrix_power(Abar, length))[:, 0]
