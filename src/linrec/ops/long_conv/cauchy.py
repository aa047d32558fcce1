"""The kernel of a state-space model that is diagonal plus low rank, from its spectrum."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from linrec.ops.long_conv import triton as triton_backend
from linrec.ops.precision import real_dtype


def kernel_of_low_rank(
    Lambda: Tensor, P: Tensor, B: Tensor, C: Tensor, dt: Tensor, length: int, *, fused: bool
) -> Tensor:
    """Return K (d, length); arguments as those of `cauchy_kernel`, `fused` has Triton make the sums."""
    C = C + _after(Lambda, P, C, dt, length).to(C.dtype)
    # both of each conjugate pair
    Lambda, P, B, C = (torch.cat([x, x.conj()], 1) for x in (Lambda, P, B, C))
    # all that the sums over the state are weighted with: (C, P^*) times (B, P)
    left = torch.cat([C[:, None], P.mH], 1)
    right = torch.cat([B[:, None], P.mT], 1)
    weights = (left[:, :, None] * right[:, None]).flatten(1, 2)
    # halfway between the roots of unity, of which 1 is a pole where Lambda or dt is zero: those that are not
    # the conjugates of others
    half = (length + 1) // 2
    steps = torch.arange(length, device=Lambda.device, dtype=real_dtype(_widest(Lambda)))
    turn = torch.polar(torch.ones_like(steps), torch.pi * steps / length)
    z = torch.polar(torch.ones_like(steps[:half]), -torch.pi * (2 * steps[:half] + 1) / length)
    turn, z = turn.to(Lambda.dtype), z.to(Lambda.dtype)
    if fused:
        spectrum = _spectrum(weights, Lambda, dt, z, CauchySums.apply)
    else:
        # as many at a time as make four kernels
        at_once = max(1, 4 * length // Lambda.shape[1])
        spectrum = torch.cat(
            [
                checkpoint(_spectrum, weights, Lambda, dt, some, cauchy_sums, use_reentrant=False)
                for some in z.split(at_once)
            ],
            -1,
        )
    spectrum = torch.cat([spectrum, spectrum[:, : length // 2].conj().flip(-1)], -1)
    # the transform of K_l exp(-i pi l / length)
    return (turn * torch.fft.ifft(spectrum)).real


def cauchy_sums(weights: Tensor, Lambda: Tensor, around: Tensor, rest: Tensor) -> Tensor:
    """S_kf = sum_n w_kn / (rest_f - lambda_n around_f), with the matrix in memory.

    Args:
        weights: w (d, k, n).
        Lambda: (d, n).
        around: (d, f).
        rest: (f,).
    """
    return weights @ (1 / (rest - Lambda[..., None] * around[:, None]))


class CauchySums(torch.autograd.Function):
    """S = CauchySums.apply(weights, Lambda, around, rest) by Triton; rest has no gradient."""

    @staticmethod
    def forward(weights: Tensor, Lambda: Tensor, around: Tensor, rest: Tensor) -> Tensor:
        """Run the kernel."""
        return triton_backend.forward(weights, Lambda, around, rest)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Keep the inputs; the matrix is formed again."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, dsums: Tensor) -> tuple[Tensor | None, ...]:
        """Run the kernels of the gradients."""
        if torch.is_grad_enabled():
            # gradients that are to be differentiated again are made of torch operations
            weights, Lambda, around, rest = ctx.saved_tensors
            inputs = [x for x in (weights, Lambda, around) if x.requires_grad]
            sums = cauchy_sums(weights, Lambda, around, rest)
            found = iter(torch.autograd.grad(sums, inputs, dsums, create_graph=True))
            return *(next(found) if x.requires_grad else None for x in (weights, Lambda, around)), None
        return *triton_backend.backward(*ctx.saved_tensors, dsums), None


# autograd asks for it at every call
CauchySums.forward.__signature__ = inspect.signature(CauchySums.forward)  # type: ignore[attr-defined]


def _spectrum(
    weights: Tensor, Lambda: Tensor, dt: Tensor, z: Tensor, sums_of: Callable[..., Tensor]
) -> Tensor:
    """dt C ((1 - z) I - dt (1 + z) A / 2)^-1 B at all z, (d, z)."""
    around = dt[:, None] / 2 * (1 + z)
    rank = round(weights.shape[1] ** 0.5) - 1
    sums = sums_of(weights, Lambda, around, 1 - z)
    sums = sums.unflatten(1, (1 + rank, 1 + rank)).movedim(-1, 1)
    inner = torch.eye(rank, dtype=z.dtype, device=z.device) + around[..., None, None] * sums[..., 1:, 1:]
    # what the low rank changes
    change = sums[..., :1, 1:] @ torch.linalg.solve(inner, sums[..., 1:, :1])
    return dt[:, None] * (sums[..., 0, 0] - around * change[..., 0, 0])


def _after(Lambda: Tensor, P: Tensor, C: Tensor, dt: Tensor, length: int) -> Tensor:
    """C Abar^length of one of each conjugate pair, (d, n), with states as real numbers."""
    wide = _widest(Lambda)
    Lambda, P, C = Lambda.to(wide), P.to(wide), C.to(wide)
    real, imaginary = torch.diag_embed(Lambda.real), torch.diag_embed(Lambda.imag)
    normal = torch.cat([torch.cat([real, -imaginary], -1), torch.cat([imaginary, real], -1)], -2)
    # P^* x of both entries of a pair is twice the real part of one
    P = torch.cat([P.real, P.imag], 1)
    A = dt.to(P.dtype)[:, None, None] / 2 * (normal - 2 * P @ P.mT)
    identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    Abar = torch.linalg.solve(identity - A, identity + A)
    row = torch.cat([C.real, -C.imag], 1)[:, None] @ torch.linalg.matrix_power(Abar, length)
    after_real, after_imag = row[:, 0].chunk(2, 1)
    return torch.complex(after_real, -after_imag)


def _widest(x: Tensor) -> torch.dtype:
    return x.dtype if x.device.type == "mps" else torch.complex128
