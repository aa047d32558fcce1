"""The convolution in torch operations: as a sum over taps for each step, and by FFT."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from linrec.ops.core.machine import exporting
from linrec.ops.core.precision import wide
from linrec.ops.long_conv.fft import Convolution, Convolved, convolution


class Filter(NamedTuple):
    """What backends take; they return y (b, t, d).

    Attributes:
        u: (b, s + t, d), the s steps of the state in front.
        kernel: (d, length).
        document: (b, s + t) integers that grow at resets, or None.
        before: s.
    """

    u: Tensor
    kernel: Tensor
    document: Tensor | None
    before: int


def by_sums(given: Filter) -> Tensor:
    """Return y_n = sum_j K_j u_{n-j}, one step after the other, each as one sum over the taps."""
    u, kernel, document, before = given
    # taps in the order of the inputs: the last one is for the current step
    u, taps = wide(u), wide(kernel).flip(1).mT
    if u.shape[1] == before:
        return u[:, before:] * kernel.sum(1)
    outputs = []
    for n in range(before, u.shape[1]):
        begin = max(0, n + 1 - len(taps))
        seen = u[:, begin : n + 1]
        if document is not None:
            hidden = document[:, begin : n + 1] != document[:, n : n + 1]
            seen = seen.masked_fill(hidden[..., None], 0)
        outputs.append((seen * taps[len(taps) - seen.shape[1] :]).sum(1, keepdim=True))
    return torch.cat(outputs, dim=1)


def by_fft(given: Filter, convolve: Callable[[Convolution], Convolved] = convolution) -> Tensor:
    """Return y = K * u by FFT."""
    u, kernel, document, before = given
    if exporting():
        return _by_shifts(given)
    if kernel.shape[1] == 0 or u[:, before:].numel() == 0:
        return u[:, before:] * kernel.sum(1)
    # the first input that a tap of an output reaches
    first = max(0, before + 1 - kernel.shape[1])
    document = None if document is None else document[:, first:]
    return convolve(Convolution(u[:, first:], kernel, document)).y[:, before - first :]


def _by_shifts(given: Filter) -> Tensor:
    """Return y = sum_j K_j (u shifted by j), for torch.export: the length decides the sizes of transforms."""
    u, kernel, document, before = given
    u, kernel = wide(u), wide(kernel)
    time, past = u.shape[1] - before, kernel.shape[1] - 1
    inputs = functional.pad(u, (0, 0, past, 0))
    owner = None if document is None else functional.pad(document, (past, 0), value=-1)
    y = torch.zeros_like(u[:, before:])
    for j, taps in enumerate(kernel.unbind(1)):
        begin = before + past - j
        shifted = inputs[:, begin : begin + time]
        if document is not None and owner is not None:
            hidden = owner[:, begin : begin + time] != document[:, before:]
            shifted = shifted.masked_fill(hidden[..., None], 0)
        y = torch.addcmul(y, shifted, taps)
    return y
