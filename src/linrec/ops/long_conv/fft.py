"""The causal convolution by FFT and its gradients, some channels at a time.

With time reversed where needed, all three are products of spectra: y = K * u, and for a gradient dy of y

    du_s = sum_t K_{t-s} dy_t        dK_j = sum_{b,t} u_{t-j} dy_t

whose spectra have the conjugates of K's and u's. Transforms are as long as no end wraps onto what is kept.
"""

import inspect
from typing import Any

import torch
from torch import Tensor

from linrec.ops.long_conv import fft_triton
from linrec.ops.long_conv.pieces import pieces, transform_size
from linrec.ops.precision import accumulation


class Convolution(torch.autograd.Function):
    """y = Convolution.apply(u, kernel, fused), with u (b, t, d), kernel (d, length) and y as u.

    With `fused`, by the kernels of `fft_triton.py`.
    """

    @staticmethod
    def forward(u: Tensor, kernel: Tensor, fused: bool) -> Tensor:
        """Multiply the spectra of every piece."""
        if fused:
            return fft_triton.forward(u, kernel)
        size = transform_size(u.shape[1] + kernel.shape[1] - 1)
        y = u.new_empty(u.shape)
        for channels, rows in pieces(u, kernel, size):
            spectrum = torch.fft.rfft(kernel[channels].to(accumulation(u.dtype)), size)
            for batch in rows:
                piece = _spectrum(u[batch, :, channels], size).mul_(spectrum)
                y[batch, :, channels] = torch.fft.irfft(piece, size)[..., : u.shape[1]].mT
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
        """Keep the inputs; spectra are computed again."""
        *tensors, ctx.fused = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Multiply spectra by conjugate ones."""
        u, kernel = ctx.saved_tensors
        needs_u, needs_kernel, _ = ctx.needs_input_grad
        if torch.is_grad_enabled():
            # a gradient that is to be differentiated again is made of convolutions
            du, dkernel = _differentiable(u, kernel, dy, needs_u, needs_kernel, ctx.fused)
        else:
            gradients = fft_triton.backward if ctx.fused else _gradients
            du, dkernel = gradients(u, kernel, dy, needs_u, needs_kernel)
        return du.to(u.dtype) if needs_u else None, dkernel.to(kernel.dtype) if needs_kernel else None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], u: Tensor, kernel: Tensor, fused: bool
    ) -> tuple[Tensor, int]:
        """Lay the mapped axis beside the channels."""
        u = u.movedim(in_dims[0], 2) if in_dims[0] is not None else _repeated(u, 2, info.batch_size)
        kernel = (
            kernel.movedim(in_dims[1], 0) if in_dims[1] is not None else _repeated(kernel, 0, info.batch_size)
        )
        y = Convolution.apply(u.flatten(2), kernel.flatten(0, 1), fused)
        return y.unflatten(2, (info.batch_size, -1)), 2


# autograd asks for it at every call
Convolution.forward.__signature__ = inspect.signature(Convolution.forward)  # type: ignore[attr-defined]


def _gradients(u: Tensor, kernel: Tensor, dy: Tensor, needs_u: bool, needs_kernel: bool) -> tuple[Any, Any]:
    time, length, wide = u.shape[1], kernel.shape[1], accumulation(u.dtype)
    size = transform_size(time + length - 1)
    du = u.new_empty(u.shape) if needs_u else None
    dkernel = kernel.new_empty(kernel.shape, dtype=wide) if needs_kernel else None
    for channels, rows in pieces(u, kernel, size):
        spectrum = torch.fft.rfft(kernel[channels].to(wide), size).conj()
        total: Tensor | int = 0
        for batch in rows:
            piece = _spectrum(dy[batch, :, channels], size)
            if dkernel is not None:
                total = total + (_spectrum(u[batch, :, channels], size).conj() * piece).sum(0)
            if du is not None:
                du[batch, :, channels] = torch.fft.irfft(piece.mul_(spectrum), size)[..., :time].mT
        if dkernel is not None:
            dkernel[channels] = torch.fft.irfft(total, size)[:, :length]
    return du, dkernel


def _differentiable(
    u: Tensor, kernel: Tensor, dy: Tensor, needs_u: bool, needs_kernel: bool, fused: bool
) -> tuple[Any, Any]:
    du = Convolution.apply(dy.flip(1), kernel, fused).flip(1) if needs_u else None
    dkernel = None
    if needs_kernel:
        # every row and channel of u is the kernel of its own dy
        wide = accumulation(u.dtype)
        rows = u.to(wide).mT.flatten(0, 1)
        both = Convolution.apply(dy.to(wide).flip(1).mT.flatten(0, 1).mT[None], rows, fused)
        dkernel = both[0].flip(0).mT.unflatten(0, (len(u), -1)).sum(0)[:, : kernel.shape[1]]
    return du, dkernel


def _spectrum(piece: Tensor, size: int) -> Tensor:
    """Spectra (b, d, size / 2 + 1) of a piece (b, t, d)."""
    return torch.fft.rfft(piece.mT.to(accumulation(piece.dtype)), size)


def _repeated(tensor: Tensor, axis: int, times: int) -> Tensor:
    return tensor.unsqueeze(axis).expand(*tensor.shape[:axis], times, *tensor.shape[axis:])
