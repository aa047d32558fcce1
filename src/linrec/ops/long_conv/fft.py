"""The causal convolution by FFT and its gradients, some channels at a time.

With time reversed where needed, all three are products of spectra: y = K * u, and for a gradient dy of y

    du_s = sum_t K_{t-s} dy_t        dK_j = sum_{b,t} u_{t-j} dy_t

whose spectra have the conjugates of the spectra of K and u. Transforms are so long that no end wraps onto the
steps that are kept. No spectrum is kept for the gradients.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linrec.ops.core.kernel import Differentiable, by_autograd
from linrec.ops.core.precision import accumulation
from linrec.ops.long_conv import documents

SMALL = 64 << 20
"""Bytes of a piece that is transformed at once: small inputs are one piece."""

ALIVE = 4
"""Real numbers of a transform's length that are alive at once for every row and channel: spectra of the input
and of the output's gradient, the product, and the library's copy of it."""

SHARED = 2
"""The same for every channel: the spectra of the kernel and of its gradient."""

ALIGNED = 16
"""The channels of a piece are a multiple of this if possible: then those of each step start at an aligned
address."""


class Convolution(NamedTuple):
    """What is convolved, none of it empty: u (b, t, d), kernel (d, length), and None or document (b, t)."""

    u: Tensor
    kernel: Tensor
    document: Tensor | None


class Convolved(NamedTuple):
    """y (b, t, d) in the dtype of u."""

    y: Tensor


def transform_size(least: int) -> int:
    """Return the smallest even length of at least `least` whose prime factors are 2, 3 and 5.

    Example:
        >>> [transform_size(least) for least in (1, 7, 17, 2001, 32767)]
        [2, 8, 18, 2048, 32768]
    """
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


def pieces(given: Convolution) -> Iterator[tuple[tuple[slice, slice, slice], Convolution]]:
    """Yield pieces whose transforms take no more memory than the inputs, each after its place in u."""
    u, kernel, document = given
    batch, _, channels = u.shape
    inputs = sum(x.numel() * x.element_size() for x in (u, kernel))
    at_once = max(SMALL, inputs) // (size_of(given) * accumulation(u.dtype).itemsize)
    most = min(channels, max(1, at_once // (ALIVE * batch + SHARED)))
    # all of one width: the library makes a plan for each width
    wide = -(-channels // -(-channels // most))
    wide = min(most, -(-wide // ALIGNED) * ALIGNED)
    deep = min(batch, max(1, (at_once - SHARED * wide) // (ALIVE * wide)))
    for begin in range(0, channels, wide):
        columns = slice(begin, begin + wide)
        for row in range(0, batch, deep):
            rows = slice(row, row + deep)
            owner = None if document is None else document[rows]
            yield (rows, slice(None), columns), Convolution(u[rows, :, columns], kernel[columns], owner)


def _outputs(given: Convolution, product: Callable[[Tensor, Tensor], Tensor] = torch.mul) -> Tensor:
    u, kernel, document = given
    if document is not None:
        return documents.outputs(u, kernel, document).to(u.dtype)
    size = size_of(given)
    taps = _spectrum(kernel, size, u)
    spectrum = product(_spectrum(u.mT, size, u), taps)
    return torch.fft.irfft(spectrum, size)[..., : u.shape[1]].mT.to(u.dtype)


def _gradients(given: Convolution, dy: Tensor, needs: Sequence[bool]) -> tuple[Any, Any]:
    u, kernel, document = given
    if document is not None:
        return documents.gradients(u, kernel, document, dy)
    size, du, dkernel = size_of(given), None, None
    spectrum = _spectrum(dy.mT, size, u)
    if needs[1]:
        total = (_spectrum(u.mT, size, u).conj() * spectrum).sum(0)
        dkernel = torch.fft.irfft(total, size)[:, : kernel.shape[1]]
    if needs[0]:
        spectrum = spectrum.mul_(_spectrum(kernel, size, u).conj())
        du = torch.fft.irfft(spectrum, size)[..., : u.shape[1]].mT
    return du, dkernel


def _spectrum(x: Tensor, size: int, u: Tensor) -> Tensor:
    return torch.fft.rfft(x.to(accumulation(u.dtype)), size)


def _forward(given: Convolution, keep: bool) -> Convolved:
    y = given.u.new_empty(given.u.shape)
    for place, piece in pieces(given):
        y[place] = _outputs(piece, Tensor.mul_)
    return Convolved(y)


def _adjoint(given: Convolution, kept: Convolved, d: Convolved, needs: Sequence[bool]) -> tuple[Any, ...]:
    u, kernel, _ = given
    # mapped where dy is
    du = d.y.new_empty(u.shape) if needs[0] else None
    dkernel = d.y.new_zeros(kernel.shape, dtype=accumulation(u.dtype)) if needs[1] else None
    for place, piece in pieces(given):
        of_u, of_kernel = _gradients(piece, d.y[place], needs)
        if du is not None:
            du[place] = of_u
        if dkernel is not None:
            dkernel[place[2]] += of_kernel
    return du, dkernel, None


def plain(given: Convolution) -> Convolved:
    """Return the convolution of all channels at once, as operations that autograd and vmap know."""
    return Convolved(_outputs(given))


again = by_autograd(plain)
convolution = Differentiable(Convolution, Convolved, _forward, _adjoint, again=again, plain=plain)
