"""The convolution as sums over taps, and by FFT. Arguments and results as in `reference.py`."""

import torch
from torch import Tensor
from torch.nn import functional

from linrec.ops.gate_loop.inputs import accumulation, widened
from linrec.ops.long_conv.fft import Convolution
from linrec.ops.operators import differentiated

FEW = 8
"""Up to this many steps, a sum over all taps for each is cheaper than transforming what came before."""


def by_sums(u: Tensor, kernel: Tensor, document: Tensor | None, before: int) -> Tensor:
    """y_n = sum_j K_j u_{n-j}, one step after the other, each as one sum over the taps."""
    u, kernel = widened(u, kernel)
    # taps as the inputs lie in time: the last is that of the current step
    taps = kernel.flip(1).mT
    outputs = [u[:, :0]]
    for n in range(before, u.shape[1]):
        begin = max(0, n + 1 - len(taps))
        seen = u[:, begin : n + 1]
        if document is not None:
            hidden = document[:, begin : n + 1] != document[:, n : n + 1]
            seen = seen.masked_fill(hidden[..., None], 0)
        outputs.append((seen * taps[len(taps) - seen.shape[1] :]).sum(1, keepdim=True))
    return torch.cat(outputs, dim=1)


def by_fft(u: Tensor, kernel: Tensor, document: Tensor | None, before: int) -> Tensor:
    """y = K * u by FFT; with documents, by halves of halves, each of which some document may span."""
    # inputs that no tap of the outputs reaches
    first = max(0, before + 1 - max(1, kernel.shape[1]))
    u = u[:, first:]
    if kernel.shape[1] == 0 or u.numel() == 0:
        return u[:, before - first :] * kernel.sum(1)
    if document is None:
        run = Convolution.apply if differentiated(u, kernel) else Convolution.forward
        y = run(u, kernel)
    else:
        y = _within_documents(u, kernel, document[:, first:])
    return y[:, before - first :]


def _within_documents(u: Tensor, kernel: Tensor, document: Tensor) -> Tensor:
    # an output is its own tap, and for every halving of time that parts it from an input, what the left half
    # gives to the right one; of those, only the document that spans the middle gives and takes
    batch, time, channels = u.shape
    wide = accumulation(u.dtype)
    size = 1 << max(0, time - 1).bit_length()
    taps = functional.pad(kernel.to(wide), (0, size - kernel.shape[1]))
    u = functional.pad(u.to(wide), (0, 0, 0, size - time))
    document = functional.pad(document, (0, size - time), value=-1)
    y = taps[:, 0] * u
    while size > 1:
        half = size // 2
        halves = u.reshape(batch, -1, 2, half, channels)
        owner = document.reshape(batch, -1, 2, half)
        middle = owner[:, :, 1, :1]
        left = halves[:, :, 0].masked_fill((owner[:, :, 0] != middle)[..., None], 0)
        # circularly, over both halves: what would wrap around falls on the left one, which is not read
        spectrum = torch.fft.rfft(left, size, dim=2) * torch.fft.rfft(taps[:, :size], dim=1).mT
        given = torch.fft.irfft(spectrum, size, dim=2)[:, :, half:]
        given = given.masked_fill((owner[:, :, 1] != middle)[..., None], 0)
        y = y + functional.pad(given, (0, 0, half, 0)).reshape(y.shape)
        size = half
    return y[:, :time]
