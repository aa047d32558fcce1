"""The convolution by FFT on GPUs: torch's transforms, and one kernel by Triton for all between two of them.

Operators that torch.compile leaves whole; formulas as in `fft.py`. Transforms need neither copies of their
inputs with time laid out anew, nor a division by their length: what pads the kernel does that.
"""

import functools
from types import ModuleType

import torch
from torch import Tensor

from linrec.ops.kernels.launch import on_device
from linrec.ops.long_conv.pieces import pieces, transform_size
from linrec.ops.operators import operator
from linrec.ops.precision import accumulation

STEPS, CHANNELS = 64, 32
"""Sides of a tile of a sequence."""

FREQUENCIES = 256
"""Frequencies of a program."""


@operator("long_conv_triton")
def forward(u: Tensor, kernel: Tensor) -> Tensor:
    """Return y of u (b, t, d) and kernel (d, length), neither without a number."""
    size = transform_size(u.shape[1] + kernel.shape[1] - 1)
    y = torch.empty(u.shape, dtype=u.dtype, device=u.device)
    with on_device(u.device):
        for channels, rows in pieces(u, kernel, size):
            taps = _spectrum_of_taps(kernel[channels], u.dtype, size)
            for batch in rows:
                piece = _spectrum(u[batch, :, channels], size)
                blocks = -(-piece.shape[2] // FREQUENCIES)
                _kernels().multiply[piece.shape[0] * piece.shape[1] * blocks,](
                    torch.view_as_real(piece),
                    torch.view_as_real(taps),
                    *piece.shape[1:],
                    F=FREQUENCIES,
                )
                _cut(_inverse(piece, size), y[batch, :, channels])
    return y


@torch.library.register_fake(forward)
def _(u: Tensor, kernel: Tensor) -> Tensor:
    return torch.empty(u.shape, dtype=u.dtype, device=u.device)


@operator("long_conv_triton_backward")
def backward(
    u: Tensor, kernel: Tensor, dy: Tensor, needs_u: bool, needs_kernel: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of u, and of the kernel in the dtype of sums; () for one that is not needed."""
    length = kernel.shape[1]
    size = transform_size(u.shape[1] + length - 1)
    du, dkernel = _gradients_of(u, kernel, needs_u, needs_kernel)
    with on_device(u.device):
        for channels, rows in pieces(u, kernel, size):
            taps = _spectrum_of_taps(kernel[channels], u.dtype, size) if needs_u else None
            total = None
            for batch in rows:
                given = _spectrum(u[batch, :, channels], size) if needs_kernel else None
                piece = _spectrum(dy[batch, :, channels], size)
                part = _multiply_by_conjugates(piece, given, taps, size)
                del given
                total = part if total is None or part is None else total.add_(part)
                if needs_u:
                    _cut(_inverse(piece, size), du[batch, :, channels])
                del piece, part
            if total is not None:
                dkernel[channels] = _inverse(total, size)[:, :length]
    return du, dkernel


@torch.library.register_fake(backward)
def _(u: Tensor, kernel: Tensor, dy: Tensor, needs_u: bool, needs_kernel: bool) -> tuple[Tensor, Tensor]:
    return _gradients_of(u, kernel, needs_u, needs_kernel)


def _gradients_of(u: Tensor, kernel: Tensor, needs_u: bool, needs_kernel: bool) -> tuple[Tensor, Tensor]:
    """Memory for both gradients."""
    return (
        torch.empty(u.shape if needs_u else (0,), dtype=u.dtype, device=u.device),
        torch.empty(kernel.shape if needs_kernel else (0,), dtype=accumulation(u.dtype), device=u.device),
    )


def _spectrum(x: Tensor, size: int, dtype: torch.dtype | None = None, *, scaled: bool = False) -> Tensor:
    """Spectra (b, d, size / 2 + 1) of x (b, t, d), `scaled` over size."""
    batch, time, channels = x.shape
    padded = torch.empty(batch, channels, size, dtype=accumulation(dtype or x.dtype), device=x.device)
    _kernels().pad[_tiles(batch, size, channels),](
        x.resolve_neg(),
        padded,
        time,
        channels,
        size,
        *x.stride(),
        SCALED=scaled,
        T=STEPS,
        C=CHANNELS,
    )
    return torch.fft.rfft(padded)


def _spectrum_of_taps(kernel: Tensor, dtype: torch.dtype, size: int) -> Tensor:
    """Spectra (d, size / 2 + 1) of a kernel beside inputs in this dtype, over size."""
    return _spectrum(kernel.mT[None], size, dtype, scaled=True)[0]


def _multiply_by_conjugates(dy: Tensor, u: Tensor | None, taps: Tensor | None, size: int) -> Tensor | None:
    """Multiply dy (b, d, f) by taps^*, in place, and return the sum of u^* dy over b, over size."""
    batch, channels, frequencies = dy.shape
    total = None if u is None else torch.empty(channels, frequencies, dtype=dy.dtype, device=dy.device)
    pairs = [torch.view_as_real(dy if x is None else x) for x in (dy, u, taps, total)]
    _kernels().gradients[channels * -(-frequencies // FREQUENCIES),](
        *pairs,
        batch,
        channels,
        frequencies,
        size,
        NEEDS_U=taps is not None,
        NEEDS_K=u is not None,
        F=FREQUENCIES,
    )
    return total


def _inverse(spectra: Tensor, size: int) -> Tensor:
    """Sequences (..., size) of spectra that are divided by the size already."""
    return torch.fft.irfft(spectra, size, norm="forward")


def _cut(x: Tensor, out: Tensor) -> None:
    """Write the first steps of x (b, d, size) to out (b, t, d)."""
    batch, time, channels = out.shape
    _kernels().cut[_tiles(batch, time, channels),](
        x, out, time, channels, x.shape[2], *out.stride(), T=STEPS, C=CHANNELS
    )


def _tiles(batch: int, time: int, channels: int) -> int:
    return batch * -(-time // STEPS) * -(-channels // CHANNELS)


@functools.cache
def _kernels() -> ModuleType:
    from linrec.ops.kernels.fft import long_conv_triton as fft_triton_kernels

    return fft_triton_kernels
