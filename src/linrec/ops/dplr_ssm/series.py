"""Power series in z whose coefficients are small matrices, cut after as many terms as a sequence has steps.

They are the taps of causal filters: a product of series is one filter after the other, and 1 / (1 + z f) is
what feeding f back a step later makes of a signal. Series are (r, s, d, t): r x s matrices for each of d
channels and t powers of z.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from linrec.ops.core.kernel import Differentiable
from linrec.ops.long_conv.torch import transform_size


def delayed(series: Tensor) -> Tensor:
    """z f, with as many terms as f."""
    return functional.pad(series, (1, 0))[..., :-1]


def times(f: Tensor, g: Tensor) -> Tensor:
    """f g, of f (r, s, d, t) and g (s, k, d, t)."""
    length = f.shape[-1]
    size = transform_size(2 * length - 1)
    return torch.fft.irfft(_product(torch.fft.rfft(f, size), torch.fft.rfft(g, size)), size)[..., :length]


def matrices(f: Tensor, length: int) -> Tensor:
    """M with g M = f g for rows g of so many terms: (.., t) to (.., length, length)."""
    return functional.pad(f[..., :length], (length - 1, 0)).unfold(-1, length, 1).flip(-2)


class Series(NamedTuple):
    """f (r, r, d, t)."""

    f: Tensor


class Inverse(NamedTuple):
    """v = (1 + z f)^-1, as f."""

    v: Tensor


def fed_back(f: Tensor) -> Tensor:
    """Return (1 + z f)^-1 of f (r, r, d, t), by Newton's iteration on its first terms."""
    return _fed_back(Series(f)).v


def _inverse(given: Series, keep: bool) -> Inverse:
    """Double the terms that are right: v <- v - v ((1 + z f) v - 1)."""
    f = given.f
    time = f.shape[-1]
    identity = torch.eye(len(f), dtype=f.dtype, device=f.device)[..., None, None]
    h = torch.cat([identity.expand_as(f[..., :1]), f[..., : time - 1]], -1)
    lengths = [time]
    while lengths[-1] > 1:
        lengths.append((lengths[-1] + 1) // 2)
    v = h[..., :1]
    for length in reversed(lengths[:-1]):
        known = v.shape[-1]
        # what wraps around falls on the terms that are known
        size = transform_size(length)
        spectrum = torch.fft.rfft(v, size)
        error = torch.fft.irfft(_product(torch.fft.rfft(h[..., :length], size), spectrum), size)
        error = functional.pad(error[..., known:length], (known, 0))
        change = torch.fft.irfft(_product(spectrum, torch.fft.rfft(error, size)), size)
        v = torch.cat([v, -change[..., known:length]], -1)
    return Inverse(v)


def _adjoint(given: Series, kept: Inverse, d: Inverse, needs: Sequence[bool]) -> tuple[Tensor]:
    """df of dv = -v z df v: products with time reversed."""
    v = kept.v.transpose(0, 1)
    dh = -times(times(v, d.v.flip(-1)), v).flip(-1)
    return (functional.pad(dh[..., 1:], (0, 1)),)


_fed_back = Differentiable(Series, Inverse, _inverse, _adjoint, again=_adjoint, saves=("v",))


def _product(f: Tensor, g: Tensor) -> Tensor:
    # matrices are of one or two rows, which products of matrices are slow for
    return (f[:, :, None] * g[None]).sum(1)
