"""The convolution by FFT on GPUs: torch's transforms, with fused Triton kernels around them.

See `torch.py` for the formulas. The kernel that pads the inputs also transposes time to the last axis and
divides by the transform's length, so the transforms need neither copies nor scaling.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from linrec.ops.core.kernel import NOTHING, Differentiable, Gradients, kernel_op, like
from linrec.ops.core.precision import accumulation
from linrec.ops.kernels.launch import Kernels, on_device
from linrec.ops.long_conv.torch import BESIDE, Convolution, Convolved, gradients_by, pieces, plain, size_of

KERNELS = Kernels("fft.triton")
STEPS, CHANNELS = 64, 32
"""Sides of a tile of a sequence: steps and channels."""

FREQUENCIES = 256
"""Number of frequencies per program."""


def _forward(out: Convolved, given: Convolution) -> None:
    size, dtype = size_of(given), given.u.dtype
    with on_device(given.u.device):
        for place, (u, kernel, _) in pieces(given, size):
            taps = _spectrum(kernel.mT[None], size, dtype, scaled=True)[0]
            spectrum = _spectrum(u, size, dtype)
            batch, channels, f = spectrum.shape
            KERNELS.multiply[batch * channels * -(-f // FREQUENCIES),](
                torch.view_as_real(spectrum), torch.view_as_real(taps), channels, f, F=FREQUENCIES
            )
            _cut(spectrum, size, out.y[place])


def _space(given: Convolution, kept: Convolved, d: Convolved, needs: Sequence[bool]) -> Any:
    u, kernel, _ = given
    return like(u if needs[0] else None), like(kernel if needs[1] else None, accumulation(u.dtype)), NOTHING


def _adjoint(out: Gradients, given: Convolution, kept: Convolved, d: Convolved) -> None:
    size, dtype, needs_u, needs_k = size_of(given), given.u.dtype, out.u is not None, out.kernel is not None
    if needs_k:
        out.kernel.zero_()
    with on_device(given.u.device):
        for place, (u, kernel, _) in pieces(given, size):
            taps = _spectrum(kernel.mT[None], size, dtype, scaled=True)[0] if needs_u else None
            inputs = _spectrum(u, size, dtype) if needs_k else None
            spectrum = _spectrum(d.y[place], size, dtype)
            batch, channels, f = spectrum.shape
            total = spectrum.new_empty(channels, f) if needs_k else None
            # `spectrum` is overwritten with the spectrum of du
            read = [torch.view_as_real(spectrum if x is None else x) for x in (spectrum, inputs, taps, total)]
            KERNELS.gradients[channels * -(-f // FREQUENCIES),](
                *read, batch, channels, f, size, NEEDS_U=needs_u, NEEDS_K=needs_k, F=FREQUENCIES
            )
            del inputs, read
            if needs_u:
                _cut(spectrum, size, out.u[place])
            del spectrum
            if needs_k:
                taken = torch.fft.irfft(total, size, norm="forward")
                out.kernel[place[2]] += taken[:, : kernel.shape[1]]


def _spectrum(x: Tensor, size: int, dtype: torch.dtype, *, scaled: bool = False) -> Tensor:
    """Return spectra (b, d, size / 2 + 1) of x (b, t, d) in the precision for `dtype`, optionally / size."""
    batch, time, channels = x.shape
    padded = torch.empty(batch, channels, size, dtype=accumulation(dtype), device=x.device)
    KERNELS.pad[_tiles(batch, size, channels),](
        x.resolve_neg(), padded, time, channels, size, *x.stride(), SCALED=scaled, T=STEPS, C=CHANNELS
    )
    return torch.fft.rfft(padded)


def _cut(spectra: Tensor, size: int, out: Tensor) -> None:
    """Write the first steps of the inverse transform of scaled spectra (b, d, f) to out (b, t, d)."""
    x = torch.fft.irfft(spectra, size, norm="forward")
    KERNELS.cut[_tiles(*out.shape),](x, out, *out.shape[1:], size, *out.stride(), T=STEPS, C=CHANNELS)


def _tiles(batch: int, time: int, channels: int) -> int:
    return batch * -(-time // STEPS) * -(-channels // CHANNELS)


convolution: Differentiable[Convolution, Convolved] = kernel_op(
    "long_conv_triton", Convolution, Convolved, lambda given, keep: (like(given.u),), _forward, _adjoint,
    gradients=_space, plain=plain, beside=BESIDE,
    again=lambda given, kept, d, needs: gradients_by(convolution, given, d, needs),
)  # fmt: skip
