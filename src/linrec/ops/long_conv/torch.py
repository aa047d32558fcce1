"""The convolution in torch operations: as a sum over taps for each step, and by FFT.

By FFT, outputs and gradients are products of spectra. For y = K * u and a gradient dy of y

    du_s = sum_t K_{t-s} dy_t        dK_j = sum_{b,t} u_{t-j} dy_t

which use the conjugate spectra of K and u. Transforms are long enough that circular wrap-around does not
reach the steps that are used. No spectrum is saved for the gradients. Only some channels are transformed at a
time.

For packed documents, time is halved recursively. An output is the sum of its own tap and, at each halving
that separates it from an input, a contribution of the left half to the right half. Only the document that
spans the middle contributes. So each level is a circular convolution of the left half over both halves;
wrap-around falls on the left half, which is not used.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from linrec.ops.core.ambient import exporting
from linrec.ops.core.kernel import Differentiable, by_autograd
from linrec.ops.core.precision import accumulation, wide
from linrec.ops.short_conv.torch import by_shifts

SMALL = 64 << 20
"""Bytes that may be transformed at once in any case: small inputs are not divided."""

ALIVE = 4
"""Number of real arrays of the transform's length that are alive at once per row and channel: spectra of the
input and of the output's gradient, their product, and the FFT library's copy of it."""

SHARED = 2
"""The same per channel: the spectra of the kernel and of its gradient."""

ALIGNED = 16
"""Blocks have a multiple of this many channels if possible, so that the channels of each step are aligned in
memory."""


class Convolution(NamedTuple):
    """Inputs of a convolution.

    Attributes:
        u: (b, t, d), starting with the steps of the state.
        kernel: (d, length).
        document: (b, t) integers that grow at resets, or None.
    """

    u: Tensor
    kernel: Tensor
    document: Tensor | None


class Convolved(NamedTuple):
    """y (b, t, d) in the dtype of u."""

    y: Tensor


def by_sums(given: Convolution, before: int) -> Tensor:
    """Return y_n = sum_j K_j u_{n-j} for the steps from `before` on, each as a sum over the taps."""
    u, kernel, document = given
    # taps in the order of the inputs: the last tap is for the current step
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


def transform_size(least: int) -> int:
    """Return the smallest even length of at least `least` whose prime factors are 2, 3 and 5."""
    best = 1 << max(1, (least - 1).bit_length())
    five = 1
    while five < best:
        three = five
        while three < best:
            size = 2 * three
            while size < least:
                size *= 2
            best = min(best, size)
            three *= 3
        five *= 5
    return best


def size_of(given: Convolution) -> int:
    """Return the length of the transforms."""
    time = given.u.shape[1]
    return transform_size(time + given.kernel.shape[1] - 1) if given.document is None else 2 * time


def pieces(given: Convolution, size: int) -> Iterator[tuple[tuple[slice, slice, slice], Convolution]]:
    """Yield blocks whose transforms need no more memory than the inputs, each with its indices in u."""
    u, kernel, document = given
    batch, _, channels = u.shape
    inputs = sum(x.numel() * x.element_size() for x in (u, kernel))
    at_once = max(SMALL, inputs) // (size * accumulation(u.dtype).itemsize)
    most = min(channels, max(1, at_once // (ALIVE * batch + SHARED)))
    # blocks of equal width, because the FFT library makes a plan for each width
    wide = -(-channels // -(-channels // most))
    wide = min(most, -(-wide // ALIGNED) * ALIGNED)
    deep = min(batch, max(1, (at_once - SHARED * wide) // (ALIVE * wide)))
    for begin in range(0, channels, wide):
        columns = slice(begin, begin + wide)
        for row in range(0, batch, deep):
            rows = slice(row, row + deep)
            owner = None if document is None else document[rows]
            yield (rows, slice(None), columns), Convolution(u[rows, :, columns], kernel[columns], owner)


def _outputs(given: Convolution, size: int, product: Callable[..., Tensor] = torch.mul) -> Tensor:
    u, kernel, document = given
    if document is not None:
        return _outputs_of_documents(given, document).to(u.dtype)
    taps = _spectrum(kernel, size)
    spectrum = product(_spectrum(u.mT, size), taps)
    return torch.fft.irfft(spectrum, size)[..., : u.shape[1]].mT.to(u.dtype)


def _gradients(given: Convolution, size: int, dy: Tensor, needs: Sequence[bool]) -> tuple[Any, Any]:
    u, kernel, document = given
    if document is not None:
        return _gradients_of_documents(given, document, dy)
    du, dkernel, spectrum = None, None, _spectrum(dy.mT, size)
    if needs[1]:
        total = (_spectrum(u.mT, size).conj() * spectrum).sum(0)
        dkernel = torch.fft.irfft(total, size)[:, : kernel.shape[1]]
    if needs[0]:
        spectrum = spectrum.mul_(_spectrum(kernel, size).conj())
        du = torch.fft.irfft(spectrum, size)[..., : u.shape[1]].mT
    return du, dkernel


def _spectrum(x: Tensor, size: int) -> Tensor:
    return torch.fft.rfft(wide(x), size)


def _outputs_of_documents(given: Convolution, document: Tensor) -> Tensor:
    u, taps, document = _to_power_of_two(given, document)
    y = taps[:, 0] * u
    for size, hidden_left, hidden_right in _levels(document):
        left = _halves(u, size)[:, :, 0].masked_fill(hidden_left, 0)
        spectrum = torch.fft.rfft(left, size, dim=2) * torch.fft.rfft(taps[:, :size]).mT
        added = torch.fft.irfft(spectrum, size, dim=2)[:, :, size // 2 :].masked_fill(hidden_right, 0)
        y = y + functional.pad(added, (0, 0, size // 2, 0)).reshape(y.shape)
    return y[:, : given.u.shape[1]]


def _gradients_of_documents(given: Convolution, document: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    u, taps, document = _to_power_of_two(given, document)
    dy = functional.pad(dy.to(u.dtype), (0, 0, 0, u.shape[1] - dy.shape[1]))
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
    return du[:, : given.u.shape[1]], dtaps[:, : given.kernel.shape[1]]


def _levels(document: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield every halving: its size, and the steps of its halves that are not in the middle document."""
    size = document.shape[1]
    while size > 1:
        owner = document.reshape(len(document), -1, 2, size // 2, 1)
        middle = owner[:, :, 1, :1]
        yield size, owner[:, :, 0] != middle, owner[:, :, 1] != middle
        size //= 2


def _halves(x: Tensor, size: int) -> Tensor:
    return x.reshape(len(x), -1, 2, size // 2, x.shape[-1])


def _to_power_of_two(given: Convolution, document: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    u, kernel, time = wide(given.u), wide(given.kernel), given.u.shape[1]
    size = 1 << (time - 1).bit_length()
    u, taps = functional.pad(u, (0, 0, 0, size - time)), functional.pad(kernel, (0, size - kernel.shape[1]))
    # padding belongs to no document
    return u, taps, functional.pad(document, (0, size - time), value=-1)


def _forward(given: Convolution, keep: bool) -> Convolved:
    y, size = given.u.new_empty(given.u.shape), size_of(given)
    for place, piece in pieces(given, size):
        y[place] = _outputs(piece, size, Tensor.mul_)
    return Convolved(y)


def _adjoint(given: Convolution, kept: Convolved, d: Convolved, needs: Sequence[bool]) -> tuple[Any, ...]:
    u, kernel, size = given.u, given.kernel, size_of(given)
    # allocated from dy, so that vmap maps it like dy
    du = d.y.new_empty(u.shape) if needs[0] else None
    dkernel = d.y.new_zeros(kernel.shape, dtype=accumulation(u.dtype)) if needs[1] else None
    for place, piece in pieces(given, size):
        of_u, of_kernel = _gradients(piece, size, d.y[place], needs)
        if du is not None:
            du[place] = of_u
        if dkernel is not None:
            dkernel[place[2]] += of_kernel
    return du, dkernel, None


def plain(given: Convolution) -> Convolved:
    """Return the convolution of all channels at once, in operations that support autograd and vmap."""
    return Convolved(_outputs(given, size_of(given)))


def gradients_by(
    convolve: Callable[[Convolution], Convolved], given: Convolution, d: Convolved, needs: Sequence[bool]
) -> Sequence[Tensor | None]:
    """Return the gradients as convolutions, which can be differentiated again."""
    u, kernel, document = given
    if document is not None:
        return by_autograd(plain)(given, None, d, needs)
    du = convolve(Convolution(d.y.flip(1), kernel, None)).y.flip(1) if needs[0] else None
    if not needs[1]:
        return du, None, None
    # every row and channel of u is the kernel for the same row and channel of dy
    dy = wide(d.y).flip(1).mT.flatten(0, 1).mT[None]
    both = convolve(Convolution(dy, wide(u).mT.flatten(0, 1), None)).y[0].flip(0)
    return du, both.mT.unflatten(0, (len(u), -1)).sum(0)[:, : kernel.shape[1]], None


BESIDE = {"u": 2, "kernel": 0, "y": 2}
"""Under vmap, the mapped axis is folded into the channels."""

convolution: Differentiable[Convolution, Convolved] = Differentiable(
    Convolution, Convolved, _forward, _adjoint, plain=plain, beside=BESIDE,
    again=lambda given, kept, d, needs: gradients_by(convolution, given, d, needs),
)  # fmt: skip


def by_fft(
    given: Convolution, before: int, convolve: Callable[[Convolution], Convolved] = convolution
) -> Tensor:
    """Return y = K * u for the steps from `before` on, by FFT; `convolve` gets non-empty inputs only."""
    u, kernel, document = given
    if kernel.shape[1] == 0 or (not exporting() and u[:, before:].numel() == 0):
        return u[:, before:] * kernel.sum(1)
    if exporting():
        # sizes of transforms would depend on the length
        u, past = wide(u), kernel.shape[1] - 1
        inputs = functional.pad(u, (0, 0, past, 0))[:, before:]
        document = None if document is None else functional.pad(document, (past, 0), value=-1)[:, before:]
        return by_shifts(u[:, before:], inputs, wide(kernel), document)
    # the first input that contributes to an output
    first = max(0, before + 1 - kernel.shape[1])
    document = None if document is None else document[:, first:]
    return convolve(Convolution(u[:, first:], kernel, document)).y[:, before - first :]
