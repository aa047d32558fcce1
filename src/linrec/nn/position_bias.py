"""Biases of attention scores by distance: b_i for pairs of steps that are i steps apart."""

import math
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from linrec.nn.parameters import mark
from linrec.nn.rotary import Rotary
from linrec.rules import at_least, choice

__all__ = [
    "BucketBias",
    "BucketPositions",
    "RotaryBias",
    "StandardizedBias",
    "ToeplitzBias",
    "make_bucket_bias",
]

BucketPositions = Literal["t5", "none"]


class ToeplitzBias(nn.Module):
    """b_i = w_i for i = 0 .. size - 1, a learned number for each distance.

    Args:
        size: distances.
        std: standard deviation of w when training starts.

    Example:
        >>> ToeplitzBias(4, std=0.02)().shape
        torch.Size([4])
    """

    def __init__(self, size: int, *, std: float) -> None:
        super().__init__()
        self.w = nn.Parameter(std * torch.randn(size))

    def forward(self) -> Float[Tensor, "size"]:
        """Return the biases of all distances."""
        return self.w


class RotaryBias(nn.Module):
    """b_i = (R_0 a) . (R_i b) for i = 0 .. size - 1, of learned a and b, whose pairs of channels turn.

    Args:
        size: distances.
        d: channels of a and b, even.
        base: of the frequencies; see `linrec.nn.Rotary`.
        std: standard deviation of a and b when training starts.

    Source:
        Hua, Dai, Liu and Le, Transformer Quality in Linear Time (2022), its relative position bias from 512
        steps on.

    Example:
        >>> RotaryBias(4, 6, std=0.02)().shape
        torch.Size([4])
    """

    def __init__(self, size: int, d: int, *, base: float = 10_000.0, std: float) -> None:
        super().__init__()
        self.size, self.rotary = size, Rotary(d, base=base)
        self.a = nn.Parameter(std * torch.randn(d))
        self.b = nn.Parameter(std * torch.randn(d))

    def forward(self) -> Float[Tensor, "size"]:
        """Return the biases of all distances."""
        distance = torch.arange(self.size, device=self.b.device)[None]
        (turned,) = self.rotary(distance, self.b.expand(1, self.size, 1, -1))
        return turned[0, :, 0] @ self.a


class StandardizedBias(nn.Module):
    """w = gamma (u - mean(u)) / std(u) + beta, a learned number for each distance of each head.

    Mean and standard deviation are over the numbers of a head. u is normal when training starts, gamma and
    beta are zero, and so is w.

    Args:
        n_heads: heads h.
        size: distances s, at least 2.

    Source:
        An Attention Free Transformer (Zhai and others, 2021), the reparameterization of AFT-conv.

    Example:
        >>> StandardizedBias(2, 4)(dtype=torch.float32).abs().max().item()
        0.0
    """

    def __init__(self, n_heads: int, size: int) -> None:
        super().__init__()
        self.u = nn.Parameter(torch.randn(n_heads, size))
        self.gamma = nn.Parameter(torch.zeros(n_heads))
        self.beta = nn.Parameter(torch.zeros(n_heads))
        mark(self, group="channel", weight_decay=False)

    def forward(self, *, dtype: torch.dtype) -> Float[Tensor, "h size"]:
        """Return the biases of all distances in a dtype."""
        deviation, mean = torch.std_mean(self.u.to(dtype), -1, correction=0, keepdim=True)
        scaled = self.gamma.to(dtype)[:, None] * (self.u.to(dtype) - mean) / deviation
        return scaled + self.beta.to(dtype)[:, None]


class BucketBias(nn.Module):
    """b_i = w_{bucket(i)}, a learned number for each head and bucket of distances, T5's.

    Half of the buckets are of one distance each, from 0 on. The others grow with the distance up to
    `max_distance`, and the last bucket takes all larger distances.

    Args:
        n_heads: heads h.
        buckets: number of buckets, at least 2.
        max_distance: distance from which on there is one bucket.
        std: standard deviation of w when training starts.

    Raises:
        ValueError: fewer than two buckets, or a `max_distance` among the buckets of one distance.

    Source:
        Raffel and others, Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer
        (2020), section 2.1, for causal attention.

    Example:
        >>> BucketBias(2)(3, 5).shape
        torch.Size([1, 2, 3, 5])
        >>> BucketBias(1).bucket(torch.tensor([0, 15, 16, 64, 127, 1000])).tolist()
        [0, 15, 16, 26, 31, 31]
    """

    def __init__(
        self, n_heads: int, *, buckets: int = 32, max_distance: int = 128, std: float = 0.02
    ) -> None:
        super().__init__()
        at_least(2, buckets=buckets, cure="T5 has 32.")
        at_least(buckets // 2 + 1, max_distance=max_distance, cure="Half of the buckets are below it.")
        self.max_distance = max_distance
        self.w = nn.Parameter(std * torch.randn(n_heads, buckets))
        mark(self, group="channel", weight_decay=False)

    def bucket(self, distance: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
        """Return the buckets of distances >= 0."""
        exact = self.w.shape[1] // 2
        # logarithms in float64: a distance at the edge of a bucket is exact
        far = (distance.clamp(min=1).double() / exact).log() / math.log(self.max_distance / exact)
        far = (exact + far * (self.w.shape[1] - exact)).long().clamp(max=self.w.shape[1] - 1)
        return torch.where(distance < exact, distance, far)

    def forward(self, time: int, keys: int) -> Float[Tensor, "1 h t keys"]:
        """Return the biases of t queries with a number of keys, whose last t are of the queries' steps.

        Keys after the query have the bias of the distance 0.
        """
        # a row for the largest distance first; each query reads `keys` numbers, from its own place on
        distance = torch.arange(keys - 1, -max(time, 1), -1, device=self.w.device).clamp(min=0)
        return self.w[:, self.bucket(distance)].unfold(1, keys, 1).flip(1)[None, :, :time]


def make_bucket_bias(positions: BucketPositions, n_heads: int) -> BucketBias | None:
    """Return the `BucketBias` of "t5", or None for "none".

    Raises:
        ValueError: unknown `positions`.

    Example:
        >>> make_bucket_bias("none", 2) is None
        True
    """
    choice(BucketPositions, positions=positions)
    return BucketBias(n_heads) if positions == "t5" else None
