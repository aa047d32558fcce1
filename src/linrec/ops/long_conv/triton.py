"""The convolution by FFT on GPUs: torch's transforms, and one kernel by Triton for all between two of them.

Formulas are in `fft.py`. Transforms need neither copies of their inputs with time laid out anew, nor a
division by their length: the kernel that pads does both.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from linrec.ops.core.kernel import NOTHING, kernel_op, like
from linrec.ops.core.precision import accumulation
from linrec.ops.kernels import Kernels
from linrec.ops.kernels.launch import on_device
from linrec.ops.long_conv import fft
from linrec.ops.long_conv.fft import Convolution, Convolved, pieces, size_of

KERNELS = Kernels("fft.long_conv_triton")
STEPS, CHANNELS = 64, 32
"""Sides of a tile of a sequence."""

FREQUENCIES = 256
"""Frequencies of a program."""


def _forward(out: Convolved, given: Convolution) -> None:
    size, dtype = size_of(given), given.u.dtype
    with on_device(given.u.device):
        for place, (u, kernel, _) in pieces(given):
            taps, spectrum = _spectrum_of_taps(kernel, size, dtype), _spectrum(u, size, dtype)
            batch, channels, frequencies = spectrum.shape
            KERNELS.multiply[batch * channels * -(-frequencies // FREQUENCIES),](
                torch.view_as_real(spectrum), torch.view_as_real(taps), channels, frequencies, F=FREQUENCIES
            )
            _cut(_inverse(spectrum, size), out.y[place])


def _space(given: Convolution, kept: Convolved, d: Convolved, needs: Sequence[bool]) -> Any:
    u, kernel, _ = given
    sums = accumulation(u.dtype)
    return like(u if needs[0] else None), like(kernel if needs[1] else None, sums), NOTHING


def _adjoint(out: Any, given: Convolution, kept: Convolved, d: Convolved) -> None:
    size, dtype = size_of(given), given.u.dtype
    if out.kernel is not None:
        out.kernel.zero_()
    with on_device(given.u.device):
        for place, (u, kernel, _) in pieces(given):
            taps = None if out.u is None else _spectrum_of_taps(kernel, size, dtype)
            inputs = None if out.kernel is None else _spectrum(u, size, dtype)
            spectrum = _spectrum(d.y[place], size, dtype)
            total = _multiply_by_conjugates(spectrum, inputs, taps, size)
            del inputs
            if out.u is not None:
                _cut(_inverse(spectrum, size), out.u[place])
            del spectrum
            if total is not None:
                out.kernel[place[2]] += _inverse(total, size)[:, : kernel.shape[1]]


def _spectrum(x: Tensor, size: int, dtype: torch.dtype, *, scaled: bool = False) -> Tensor:
    """Return spectra (b, d, size / 2 + 1) of x (b, t, d) beside inputs in this dtype, `scaled` over size."""
    batch, time, channels = x.shape
    padded = torch.empty(batch, channels, size, dtype=accumulation(dtype), device=x.device)
    KERNELS.pad[_tiles(batch, size, channels),](
        x.resolve_neg(), padded, time, channels, size, *x.stride(), SCALED=scaled, T=STEPS, C=CHANNELS
    )
    return torch.fft.rfft(padded)


def _spectrum_of_taps(kernel: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Return spectra (d, size / 2 + 1) of a kernel, over size."""
    return _spectrum(kernel.mT[None], size, dtype, scaled=True)[0]


def _multiply_by_conjugates(dy: Tensor, u: Tensor | None, taps: Tensor | None, size: int) -> Tensor | None:
    """Multiply dy (b, d, f) by taps^*, in place, and return the sum of u^* dy over b, over size."""
    batch, channels, frequencies = dy.shape
    total = None if u is None else torch.empty_like(dy[0])
    KERNELS.gradients[channels * -(-frequencies // FREQUENCIES),](
        *[torch.view_as_real(dy if x is None else x) for x in (dy, u, taps, total)],
        *(batch, channels, frequencies, size),
        NEEDS_U=taps is not None,
        NEEDS_K=u is not None,
        F=FREQUENCIES,
    )
    return total


def _inverse(spectra: Tensor, size: int) -> Tensor:
    """Return sequences (..., size) of spectra that are divided by the size already."""
    return torch.fft.irfft(spectra, size, norm="forward")


def _cut(x: Tensor, out: Tensor) -> None:
    """Write the first steps of x (b, d, size) to out (b, t, d)."""
    KERNELS.cut[_tiles(*out.shape),](x, out, *out.shape[1:], x.shape[2], *out.stride(), T=STEPS, C=CHANNELS)


def _tiles(batch: int, time: int, channels: int) -> int:
    return batch * -(-time // STEPS) * -(-channels // CHANNELS)


convolution = kernel_op(
    "long_conv_triton",
    Convolution,
    Convolved,
    lambda given, keep: (like(given.u),),
    _forward,
    _adjoint,
    gradients=_space,
    again=fft.again,
    plain=fft.plain,
)
