"""Positions of steps over resets and pieces, windows of steps, and biases of attention scores by distance."""

import math
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.parameters import mark
from linrec.ops.attention import AttentionCache
from linrec.ops.core.ambient import exporting
from linrec.ops.core.call import time_is_split
from linrec.ops.core.loop import blocks, joined
from linrec.ops.scan import scan
from linrec.rules import at_least, choice

__all__ = [
    "AttentionState",
    "BucketBias",
    "BucketPositions",
    "StandardizedBias",
    "Windows",
    "make_bucket_bias",
    "positions",
]

BucketPositions = Literal["t5", "none"]


def positions(
    seen: Int[Tensor, "b"], time: int, *, reset: Bool[Tensor, "b t"] | None = None
) -> tuple[Int[Tensor, "b t"], Int[Tensor, "b"]]:
    """Return the position of every step, 0 where its sequence starts, and the steps seen after the last one.

    Args:
        seen: steps of each sequence before the first (b,), int64.
        time: steps t.
        reset: (b, t) bool; true where a new sequence starts.

    Returns:
        Positions (b, t) and the next step's position (b,), int64.
    """

    if time_is_split():
        # a count of steps, which is exact in float64
        ones = torch.ones(len(seen), time, 1, dtype=torch.float64, device=seen.device)
        count, last = scan(ones[:, :1, :1], ones, state=seen[:, None].to(ones.dtype), reset=reset)
        return count[..., 0].long() - 1, last[:, 0].long()
    step = torch.arange(time, device=seen.device)
    begin = -seen[:, None].expand(-1, time)
    if reset is not None:
        begin = torch.where(reset, step, begin).cummax(1).values
    position = step - begin
    return position, torch.cat([seen[:, None] - 1, position], 1)[:, -1] + 1


class AttentionState(NamedTuple):
    """The state of attention between two pieces of a sequence.

    Attributes:
        cache: keys, already turned where positions are rotary, and values of past steps.
        position: steps seen so far, (b,) int64, which is the next step's position.
    """

    cache: AttentionCache
    position: Int[Tensor, "b"]

    @classmethod
    def first(cls, cache: AttentionCache) -> "AttentionState":
        """Return the state at position 0 from an empty cache."""
        return cls(cache, torch.zeros(cache.k.shape[0], dtype=torch.int64, device=cache.k.device))


class Windows:
    """Blocks of consecutive steps; each sees itself and the `size` steps before it.

    Args:
        time: steps t.
        size: steps that a block sees before itself, and the longest block.

    Attributes:
        block: steps of a block.
    """

    def __init__(self, time: int, size: int) -> None:
        self.time, self.size = time, size
        # one exported program serves all lengths
        self.block = size if exporting() else max(1, min(time, size))
        # without steps there is a block of zeros
        self._missing = 0 if exporting() else max(self.block - time, -time % self.block)

    def steps(self, x: Shaped[Tensor, "b t *d"]) -> Shaped[Tensor, "b count block *d"]:
        """Return the steps of every block, with zeros after the last one."""
        if exporting():
            return blocks(x, self.size, 1)
        return self._padded(x).unflatten(1, (-1, self.block))

    def behind(self, x: Shaped[Tensor, "b s d"]) -> Shaped[Tensor, "b count d seen"]:
        """Return the part of `x` that every block sees; the first block begins after `size` steps."""
        if exporting():
            return blocks(x, self.size, 1, overlap=self.size).mT
        return self._padded(x).unfold(1, self.size + self.block, self.block)

    def age(self, device: torch.device | None = None) -> Int[Tensor, "block seen"]:
        """Return how many steps each step of a block comes after each step that the block sees."""
        step = torch.arange(self.size, self.size + self.block, device=device)[:, None]
        return step - torch.arange(self.size + self.block, device=device)

    def joined(self, x: Shaped[Tensor, "b count block d"]) -> Shaped[Tensor, "b t d"]:
        """Return the steps of all blocks."""
        return joined(x, self.time, 1) if exporting() else x.flatten(1, 2)[:, : self.time]

    def _padded(self, x: Tensor) -> Tensor:
        return functional.pad(x, (0, 0) * (x.dim() - 2) + (0, self._missing))


class StandardizedBias(nn.Module):
    """w = gamma (u - mean(u)) / std(u) + beta, a learned number for each distance of each head.

    Mean and standard deviation are over the numbers of a head. u is normal when training starts, gamma and
    beta are zero, and so is w.

    Args:
        n_heads: heads h.
        size: distances s, at least 2.

    Source:
        An Attention Free Transformer (Zhai and others, 2021), the reparameterization of AFT-conv.
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

    Source:
        Raffel and others, Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer
        (2020), section 2.1, for causal attention.
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
    """Return the `BucketBias` of "t5", or None for "none"."""
    choice(BucketPositions, positions=positions)
    return BucketBias(n_heads) if positions == "t5" else None
