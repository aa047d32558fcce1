"""Power series in z whose coefficients are small matrices, cut after as many terms as a sequence has steps.

They are the taps of causal filters: a product of series is one filter after the other, and 1 / (1 + z f) is
what feeding f back a step later makes of a signal. Series are (r, s, d, t): r x s matrices for each of d
channels and t powers of z.
"""

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from linrec.ops.long_conv.fft import transform_size


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


class FeedBack(torch.autograd.Function):
    """v = FeedBack.apply(f): (1 + z f)^-1 of f (r, r, d, t), by Newton's iteration on its first terms."""

    generate_vmap_rule = True

    @staticmethod
    def forward(f: Tensor) -> Tensor:
        """Double the terms that are right: v <- v - v ((1 + z f) v - 1)."""
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
        return v

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Keep the result."""
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, dv: Tensor) -> Tensor:
        """df of dv = -v z df v: products with time reversed."""
        (v,) = ctx.saved_tensors
        v = v.transpose(0, 1)
        dh = -times(times(v, dv.flip(-1)), v).flip(-1)
        return functional.pad(dh[..., 1:], (0, 1))


# autograd asks for it at every call
FeedBack.forward.__signature__ = inspect.signature(FeedBack.forward)  # type: ignore[attr-defined]


def _product(f: Tensor, g: Tensor) -> Tensor:
    # matrices are of one or two rows, which products of matrices are slow for
    return (f[:, :, None] * g[None]).sum(1)
