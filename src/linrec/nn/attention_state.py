"""The state of softmax attention with positions."""

from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from linrec.ops.attention import AttentionCache

__all__ = ["AttentionState"]


class AttentionState(NamedTuple):
    """The state of attention between two pieces of a sequence.

    Attributes:
        cache: keys, already turned where positions are rotary, and values of past steps.
        position: steps seen so far, (b,) int64, which is the next step's position.

    Example:
        >>> from linrec.ops.attention import softmax_attention
        >>> AttentionState.first(softmax_attention.empty_state(1, 1, 1, 1)).position
        tensor([0])
    """

    cache: AttentionCache
    position: Int[Tensor, "b"]

    @classmethod
    def first(cls, cache: AttentionCache) -> "AttentionState":
        """Return the state at position 0 from an empty cache."""
        return cls(cache, torch.zeros(cache.k.shape[0], dtype=torch.int64, device=cache.k.device))
