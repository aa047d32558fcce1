"""The convolution where documents follow each other in a row, by halves of halves of time.

An output is its own tap, and for every halving of time that parts it from an input, what the left half gives
to the right one. Of those, only the document that spans the middle gives and takes. So each level is a
circular convolution of the left halves over both: what would wrap around falls on the left half, which is not
read.
"""

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from linrec.ops.long_conv.pieces import pieces
from linrec.ops.precision import accumulation


class WithinDocuments(torch.autograd.Function):
    """y = WithinDocuments.apply(u, kernel, document), with u (b, t, d), kernel (d, length) and y as u."""

    @staticmethod
    def forward(u: Tensor, kernel: Tensor, document: Tensor) -> Tensor:
        """Run every piece by itself."""
        y = u.new_empty(u.shape)
        for channels, rows in pieces(u, kernel, 2 * u.shape[1]):
            for batch in rows:
                y[batch, :, channels] = _outputs(u[batch, :, channels], kernel[channels], document[batch])
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        """Keep the inputs; spectra are computed again."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Give every right half's gradient to the left one, and to the taps between them."""
        u, kernel, document = ctx.saved_tensors
        if torch.is_grad_enabled():
            # a gradient that is to be differentiated again is made by autograd
            y = _outputs(u, kernel, document).to(dy.dtype)
            wanted = [x for x, need in zip((u, kernel), ctx.needs_input_grad, strict=False) if need]
            found = iter(torch.autograd.grad(y, wanted, dy, create_graph=True))
            return *(next(found) if need else None for need in ctx.needs_input_grad[:2]), None
        du = u.new_empty(u.shape)
        dkernel = kernel.new_zeros(kernel.shape, dtype=accumulation(u.dtype))
        for channels, rows in pieces(u, kernel, 2 * u.shape[1]):
            for batch in rows:
                given = (u[batch, :, channels], kernel[channels], document[batch], dy[batch, :, channels])
                du[batch, :, channels], part = _gradients(*given)
                dkernel[channels] += part
        return du, dkernel.to(kernel.dtype), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Tensor) -> tuple[Tensor, int]:
        """Map the levels; each is made of plain operations."""
        return torch.func.vmap(_outputs, in_dims)(*inputs).to(inputs[0].dtype), 0


# autograd asks for it at every call
WithinDocuments.forward.__signature__ = inspect.signature(WithinDocuments.forward)  # type: ignore[attr-defined]


class _Level(NamedTuple):
    """One halving: its size, and what does not give or take."""

    size: int
    left: Tensor
    right: Tensor


def _levels(document: Tensor) -> Iterator[_Level]:
    size = document.shape[1]
    while size > 1:
        owner = document.reshape(len(document), -1, 2, size // 2, 1)
        middle = owner[:, :, 1, :1]
        yield _Level(size, owner[:, :, 0] != middle, owner[:, :, 1] != middle)
        size //= 2


def _outputs(u: Tensor, kernel: Tensor, document: Tensor) -> Tensor:
    time = u.shape[1]
    u, taps, document = _to_power_of_two(u, kernel, document)
    y = taps[:, 0] * u
    for size, hidden_left, hidden_right in _levels(document):
        left = _halves(u, size)[:, :, 0].masked_fill(hidden_left, 0)
        spectrum = torch.fft.rfft(left, size, dim=2) * torch.fft.rfft(taps[:, :size]).mT
        given = torch.fft.irfft(spectrum, size, dim=2)[:, :, size // 2 :].masked_fill(hidden_right, 0)
        y = y + functional.pad(given, (0, 0, size // 2, 0)).reshape(y.shape)
    return y[:, :time]


def _gradients(u: Tensor, kernel: Tensor, document: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    time, length = u.shape[1], kernel.shape[1]
    u, taps, document = _to_power_of_two(u, kernel, document)
    dy = functional.pad(dy.to(u.dtype), (0, 0, 0, u.shape[1] - time))
    du, dtaps = taps[:, 0] * dy, torch.zeros_like(taps)
    dtaps[:, 0] = (u * dy).sum((0, 1))
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


def _halves(x: Tensor, size: int) -> Tensor:
    return x.reshape(len(x), -1, 2, size // 2, x.shape[-1])


def _to_power_of_two(u: Tensor, kernel: Tensor, document: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    time, wide = u.shape[1], accumulation(u.dtype)
    size = 1 << max(0, time - 1).bit_length()
    u = functional.pad(u.to(wide), (0, 0, 0, size - time))
    taps = functional.pad(kernel.to(wide), (0, size - kernel.shape[1]))
    # what follows the end belongs to no document
    return u, taps, functional.pad(document, (0, size - time), value=-1)
