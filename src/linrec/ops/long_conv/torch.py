"""The convolution as sums over taps, and by FFT. Arguments and results as in `reference.py`."""

import torch
from torch import Tensor
from torch.nn import functional

from linrec.ops.dispatch import exporting
from linrec.ops.long_conv.documents import WithinDocuments
from linrec.ops.long_conv.fft import Convolution
from linrec.ops.operators import differentiated
from linrec.ops.precision import widened

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


def by_fft(u: Tensor, kernel: Tensor, document: Tensor | None, before: int, *, fused: bool = False) -> Tensor:
    """y = K * u by FFT; with documents, by halves of halves, each of which some document may span.

    Without documents, `fused` has Triton do what lies between the transforms.
    """
    if exporting():
        return _by_taps(u, kernel, document, before)
    if kernel.shape[1] == 0 or u[:, before:].numel() == 0:
        return u[:, before:] * kernel.sum(1)
    # inputs that no tap of the outputs reaches
    first = max(0, before + 1 - kernel.shape[1])
    u = u[:, first:]
    inputs = (u, kernel, fused) if document is None else (u, kernel, document[:, first:])
    function = Convolution if document is None else WithinDocuments
    run = function.apply if differentiated(u, kernel) else function.forward
    return run(*inputs)[:, before - first :]


def _by_taps(u: Tensor, kernel: Tensor, document: Tensor | None, before: int) -> Tensor:
    """y = sum_j K_j (u shifted by j), for torch.export: transforms have sizes that depend on the length."""
    u, kernel = widened(u, kernel)
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
