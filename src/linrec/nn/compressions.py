"""Compressions of steps that leave a memory, and the loss that trains them, of Compressive Transformer."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.projections import matrix
from linrec.nn.segment_mixer import PastSteps
from linrec.nn.visible_attention import visible_attention
from linrec.rules import at_least, choice, divisor

__all__ = [
    "Compression",
    "ConvCompression",
    "MostUsed",
    "Pooling",
    "compressed",
    "make_compression",
    "reconstruction_loss",
]

Compression = Literal["conv", "dilated", "mean", "max", "most_used"]
# returns the attention that each step has received, (b, t)
Usage: TypeAlias = Callable[[], Tensor]


class ConvCompression(nn.Linear):
    """c_n = W [h_{n r + r - 1 - (r - 1) e} | .. | h_{n r + r - 1 - e} | h_{n r + r - 1}] + b, of dilation e.

    A convolution of r taps, e steps apart, and stride r. There are zeros before the first of the t steps.

    Args:
        d: width of a step.
        rate: r, the steps of a vector.
        dilation: e.

    Source:
        Rae and others, Compressive Transformers for Long-Range Sequence Modelling (2019), section 3.2.
    """

    def __init__(self, d: int, rate: int, *, dilation: int = 1) -> None:
        super().__init__(rate * d, d)
        self.taps = rate, dilation

    def forward(self, old: Any, usage: Usage | None = None) -> Any:
        """Return a vector for each r steps, alive if one of these steps is; `usage` is not called.

        A tensor of r steps side by side (b, n, r d) gives the vectors alone, as a linear layer does. So
        adapters and other wrappers of linear layers fit.
        """
        return super().forward(old) if isinstance(old, Tensor) else compressed(self, self.taps, old)


def compressed(
    f: nn.Module, taps: tuple[int, int] | None, old: PastSteps, usage: Usage | None = None
) -> PastSteps:
    """Return the vectors of steps that leave the memory.

    Args:
        f: the compression, or a layer in the place of a convolution.
        taps: taps r and dilation of a convolution; None for other compressions.
        old: the steps.
        usage: returns the attention that each step has received.
    """
    if taps is None:
        steps: PastSteps = f(old, usage)
        return steps
    rate, dilation = taps
    span = (rate - 1) * (dilation - 1)
    windows = functional.pad(old.h, (0, 0, span, 0)).unfold(1, rate + span, rate)
    # a convolution whose width is its stride: r steps side by side, times a matrix
    c = f(windows[..., ::dilation].mT.flatten(2))
    return PastSteps.of(c.to(old.h.dtype), _any_alive(old, rate))


class Pooling(nn.Module):
    """c_n = mean or max of h_{n r}, .., h_{n r + r - 1}.

    Args:
        rate: r, the steps of a vector.
        kind: "mean" or "max".
    """

    taps = None

    def __init__(self, rate: int, kind: Literal["mean", "max"]) -> None:
        super().__init__()
        self.rate, self.kind = rate, kind

    def forward(self, old: PastSteps, usage: Usage | None = None) -> PastSteps:
        """Return a vector for each r steps, alive if one of these steps is; `usage` is not called."""
        steps = old.h.unflatten(1, (-1, self.rate))
        c = steps.mean(2) if self.kind == "mean" else steps.amax(2)
        return PastSteps.of(c, _any_alive(old, self.rate))


class MostUsed(nn.Module):
    """The t / r steps of the largest usage, in their order, with their keys and values.

    No gradient passes through the choice.

    Args:
        rate: r.
    """

    taps = None

    def __init__(self, rate: int) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, old: PastSteps, usage: Usage) -> PastSteps:
        """Return the chosen steps; steps that are not alive come last in the choice."""
        given = usage().masked_fill(~old.alive, -1)
        place = given.topk(given.shape[1] // self.rate, 1).indices.sort(1).values
        rows = torch.arange(place.shape[0], device=place.device)[:, None]
        return PastSteps(*(part[rows, place] for part in old))


def make_compression(
    kind: Compression, d: int, segment_length: int, compression_rate: int, dilation: int = 1
) -> "ConvCompression | Pooling | MostUsed":
    """Return the compression that `kind` names, (old, usage) -> vectors, both `PastSteps`.

    Args:
        kind: "conv" for a convolution of width and stride r, "dilated", "mean", "max" or "most_used".
        d: width of a step.
        segment_length: steps that leave the memory at a time.
        compression_rate: r, the steps of a vector.
        dilation: steps between two taps of "dilated".
    """
    choice(Compression, compression=kind)
    divisor("segment_length", segment_length, compression_rate=compression_rate)
    at_least(1, dilation=dilation)
    if kind == "conv" or kind == "dilated":
        return ConvCompression(d, compression_rate, dilation=dilation if kind == "dilated" else 1)
    return MostUsed(compression_rate) if kind == "most_used" else Pooling(compression_rate, kind)


def reconstruction_loss(
    f: Callable[[PastSteps], PastSteps],
    h: Float[Tensor, "b t d"],
    old: PastSteps,
    rows: Bool[Tensor, "b t"],
    projections: Sequence[nn.Linear],
    n_heads: int,
) -> Float[Tensor, ""]:
    """Return the mean of |attn(h, old) - attn(h, f(old))|^2 over the `rows` of h that have an old step.

    attn is attention by contents alone. The gradient of the loss is of f alone.

    Args:
        f: the compression.
        h: inputs of a segment.
        old: the steps that leave the memory at its end.
        rows: which steps of the segment count.
        projections: W_q, W_k and W_v.
        n_heads: heads.
    """
    steps = old.h.detach().masked_fill(~old.alive[..., None], 0)
    c = f(PastSteps.of(steps, old.alive))
    weights = [matrix(linear, h.shape[-1], h.device).detach() for linear in projections]

    def attn(steps: Tensor, alive: Tensor) -> Tensor:
        # a row without old steps does not count, but a softmax needs a key
        visible = (alive | ~alive.any(1, keepdim=True))[:, None].expand(-1, h.shape[1], -1)
        parts = zip((h.detach(), steps, steps), weights, strict=True)
        q, k, v = (functional.linear(x, W).unflatten(-1, (n_heads, -1)) for x, W in parts)
        return visible_attention(q, k, v, visible).flatten(-2)

    error = (attn(steps, old.alive) - attn(c.h, c.alive)).square().mean(-1)
    counted = rows & old.alive.any(1, keepdim=True)
    return torch.where(counted, error, 0).sum() / counted.sum().clamp(min=1)


def _any_alive(old: PastSteps, rate: int) -> Bool[Tensor, "b n"]:
    """Return whether one of each r steps is alive."""
    return old.alive.unflatten(1, (-1, rate)).any(-1)
