"""The convolution where documents follow each other in a row, by halves of halves of time.

An output is the sum of its own tap and, for every halving of time that separates it from an input, of a
contribution of the left half to the right half. Only the document that spans the middle contributes. So each
level is a circular convolution of the left halves over both: what would wrap around falls on the left half,
which is not read.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from linrec.ops.core.precision import accumulation


def outputs(u: Tensor, kernel: Tensor, document: Tensor) -> Tensor:
    """Return y (b, t, d) of u (b, t, d), kernel (d, length) and document (b, t)."""
    time = u.shape[1]
    u, taps, document = _to_power_of_two(u, kernel, document)
    y = taps[:, 0] * u
    for size, hidden_left, hidden_right in _levels(document):
        left = _halves(u, size)[:, :, 0].masked_fill(hidden_left, 0)
        spectrum = torch.fft.rfft(left, size, dim=2) * torch.fft.rfft(taps[:, :size]).mT
        given = torch.fft.irfft(spectrum, size, dim=2)[:, :, size // 2 :].masked_fill(hidden_right, 0)
        y = y + functional.pad(given, (0, 0, size // 2, 0)).reshape(y.shape)
    return y[:, :time]


def gradients(u: Tensor, kernel: Tensor, document: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of u and of the kernel, in the accumulation dtype."""
    time, length = u.shape[1], kernel.shape[1]
    u, taps, document = _to_power_of_two(u, kernel, document)
    dy = functional.pad(dy.to(u.dtype), (0, 0, 0, u.shape[1] - time))
    du, dtaps = taps[:, 0] * dy, functional.pad((u * dy).sum((0, 1))[:, None], (0, taps.shape[1] - 1))
    for size, hidden_left, hidden_right in _levels(document):
        half = size // 2
        left = _halves(u, size)[:, :, 0].masked_fill(hidden_left, 0)
        right = _halves(dy, size)[:, :, 1].masked_fill(hidden_right, 0)
        spectrum = torch.fft.rfft(functional.pad(right, (0, 0, half, 0)), dim=2)
        change = (torch.fft.rfft(left, size, dim=2).conj() * spectrum).sum((0, 1))
        dtaps[:, :size] += torch.fft.irfft(change, size, dim=0).mT
        spectrum = spectrum * torch.fft.rfft(taps[:, :size]).conj().mT
        taken = torch.fft.irfft(spectrum, size, dim=2)[:, :, :half].masked_fill(hidden_left, 0)
        du = du + functional.pad(taken, (0, 0, 0, half)).reshape(du.shape)
    return du[:, :time], dtaps[:, :length]


def _levels(document: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield every halving: its size, and the steps of left and right halves that are not of its document."""
    size = document.shape[1]
    while size > 1:
        owner = document.reshape(len(document), -1, 2, size // 2, 1)
        middle = owner[:, :, 1, :1]
        yield size, owner[:, :, 0] != middle, owner[:, :, 1] != middle
        size //= 2


def _halves(x: Tensor, size: int) -> Tensor:
    return x.reshape(len(x), -1, 2, size // 2, x.shape[-1])


def _to_power_of_two(u: Tensor, kernel: Tensor, document: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    time, sums = u.shape[1], accumulation(u.dtype)
    size = 1 << max(0, time - 1).bit_length()
    u = functional.pad(u.to(sums), (0, 0, 0, size - time))
    taps = functional.pad(kernel.to(sums), (0, size - kernel.shape[1]))
    # steps after the end belong to no document
    return u, taps, functional.pad(document, (0, size - time), value=-1)
