"""How a convolution by FFT is divided: the length of its transforms, and how many there are at a time."""

from collections.abc import Iterator

from torch import Tensor

from linrec.ops.precision import accumulation

SMALL = 64 << 20
"""Bytes of a piece that is transformed at once: small inputs go in one."""

ALIVE = 4
"""Real numbers of a transform's length that are alive at once for every row and channel: spectra of the input
and of the output's gradient, what is transformed, and what the library transforms it with."""

SHARED = 2
"""The same for every channel: the spectra of the kernel and of its gradient."""

ALIGNED = 16
"""Channels of a piece are a multiple of this where they can be, so that those of each step start where whole
units of memory do."""


def transform_size(least: int) -> int:
    """The smallest even length of at least `least` whose prime factors are 2, 3 and 5.

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


def pieces(u: Tensor, kernel: Tensor, size: int) -> Iterator[tuple[slice, list[slice]]]:
    """Slices of channels, as many as take no more memory than the inputs, each with its slices of the batch.

    Args:
        u: what is transformed (b, t, d).
        kernel: what it is convolved with (d, length).
        size: length of the transforms.
    """
    batch, _, channels = u.shape
    inputs = sum(x.numel() * x.element_size() for x in (u, kernel))
    at_once = max(SMALL, inputs) // (size * accumulation(u.dtype).itemsize)
    most = min(channels, max(1, at_once // (ALIVE * batch + SHARED)))
    # of one size, for every other one is a plan of the library's own
    wide = -(-channels // -(-channels // most))
    wide = min(most, -(-wide // ALIGNED) * ALIGNED)
    deep = min(batch, max(1, (at_once - SHARED * wide) // (ALIVE * wide)))
    below = [slice(begin, begin + deep) for begin in range(0, batch, deep)]
    for begin in range(0, channels, wide):
        yield slice(begin, begin + wide), below
