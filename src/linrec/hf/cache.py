"""The cache of transformers that holds the states of a linrec model."""

from collections import deque
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_outputs import BaseModelOutputWithPast

from linrec.models.ragged import rows_in, rows_of
from linrec.rules import at_least
from linrec.trees import leaves, map_tree

__all__ = ["CACHE", "Snapshot", "StateCache", "cache_of_call"]

# transformers 5.24 renamed `past_key_values` to `cache`
CACHE = "cache" if "cache" in {field.name for field in fields(BaseModelOutputWithPast)} else "past_key_values"
"""Name of the cache in the outputs of the installed transformers, and among the arguments of its models."""


class Snapshot(NamedTuple):
    """The states of a model after some steps.

    Attributes:
        steps: number of steps.
        states: states of all blocks; None before the first step.
        read: the number of steps that are not masked, of all rows or of each row (b,).
    """

    steps: int
    states: Any
    read: Tensor | int = 0


class _States(CacheLayerMixin):
    """The states of all blocks, with the batch first in every tensor, or a `RaggedState`."""

    def __init__(self, *, static: bool) -> None:
        super().__init__()
        self.static = self.is_compileable = static
        self.reset()

    def reset(self) -> None:
        """Forget all steps."""
        self.now, self.is_initialized = Snapshot(0, None), False

    def write(self, now: Snapshot) -> None:
        """Replace the states; in place if they are static and have the same shapes."""
        old, new = leaves(self.now), leaves(now)
        if self.static and [x.shape for x in old] == [x.shape for x in new]:
            for place, tensor in zip(old, new, strict=True):
                place.copy_(tensor)
            now = self.now._replace(steps=now.steps, read=self.now.read if leaves(now.read) else now.read)
        self.now, self.is_initialized = now, now.states is not None

    def get_seq_length(self) -> int:
        """Return the number of steps so far."""
        return self.now.steps

    def get_max_length(self) -> int:
        """Return -1: sequences have no longest length."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length of a mask over all steps, and its offset."""
        return self.now.steps + query_length, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the sequences of these indices, as beam search asks."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Take the sequences of these indices."""
        steps, *parts = self.now
        self.now = Snapshot(steps, *(rows_of(part, indices) for part in parts))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence."""
        self.batch_select_indices(torch.arange(rows_in(self.now.states)).repeat_interleave(repeats))

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Refuse keys and values."""
        raise TypeError("a `StateCache` holds states of linrec, not keys and values.")

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Refuse keys and values."""
        raise TypeError("a `StateCache` holds states of linrec, not keys and values.")


class StateCache(Cache):
    """The states of a model; the argument `cache` of linrec's models, also called `past_key_values`.

    A state has no past, so a cache cannot be cut to fewer steps. It can go back to a snapshot: `snapshot` and
    `restore` keep and load any state, and `rollback` goes back by some steps to a state that the cache kept.

    Args:
        keep: number of earlier states that the cache keeps for `rollback`, one for each call of the model.
        static: whether new states are written into the memory of the old states, so that a compiled step
            finds them in the same place.

    Example:
        >>> cache = StateCache(keep=2)
        >>> cache.write((torch.zeros(3, 4), None), steps=5)
        >>> cache.write((torch.ones(3, 4), None), steps=2)
        >>> cache.get_seq_length(), cache.states[0].sum()
        (7, tensor(12.))
        >>> cache.rollback(2)
        >>> cache.get_seq_length(), cache.states[0].sum()
        (5, tensor(0.))
    """

    def __init__(self, *, keep: int = 0, static: bool = False) -> None:
        at_least(0, keep=keep)
        self._held = _States(static=static)
        self._kept: deque[Snapshot] = deque(maxlen=keep)
        super().__init__(layers=[self._held])

    @property
    def states(self) -> tuple[Any, ...] | None:
        """The states of all blocks; None before the first step."""
        states: tuple[Any, ...] | None = self._held.now.states
        return states

    @property
    def read(self) -> Tensor | int:
        """The number of steps that are not masked, of all rows or of each row (b,)."""
        return self._held.now.read

    def write(self, states: tuple[Any, ...], steps: int, mask: Tensor | None = None) -> None:
        """Replace the states by the states after `steps` further steps, of which `mask` (b, steps) counts."""
        if self._kept.maxlen:
            self._kept.append(self.snapshot())
        now, more = self._held.now, steps if mask is None else mask.sum(1)
        self._held.write(Snapshot(now.steps + steps, states, now.read + more))

    def snapshot(self) -> Snapshot:
        """Return a copy of the states and the number of their steps."""
        return _copied(self._held.now)

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot; later steps do not modify the snapshot."""
        self._held.write(_copied(snapshot))
        self._kept.clear()

    def rollback(self, steps: int) -> None:
        """Go back by a number of steps, to a state that the cache kept.

        Raises:
            ValueError: the cache kept no state of that step.
        """
        now = self.get_seq_length()
        kept = [earlier.steps for earlier in self._kept]
        if steps == 0:
            return
        if now - steps not in kept:
            listed = ", ".join(str(now - step) for step in reversed(kept)) or "no number of steps"
            raise ValueError(
                f"`steps` must lead to a state that the cache kept: {listed}; got {steps}. Make the cache "
                "with a larger `keep`, and call the model with fewer tokens at a time."
            )
        while (earlier := self._kept.pop()).steps != now - steps:
            pass
        self._held.write(earlier)

    def reset(self) -> None:
        """Forget all steps."""
        super().reset()
        self._kept.clear()

    def crop(self, *args: Any) -> None:
        """Refuse to cut the cache.

        Raises:
            ValueError: always.
        """
        raise ValueError("a state cannot be cut to fewer steps; use `rollback` or `restore`.")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the sequences of these indices, and forget the kept states."""
        super().reorder_cache(beam_idx)
        self._kept.clear()

    def batch_select_indices(self, indices: Tensor) -> None:
        """Take the sequences of these indices, and forget the kept states."""
        super().batch_select_indices(indices)
        self._kept.clear()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence, and forget the kept states."""
        super().batch_repeat_interleave(repeats)
        self._kept.clear()


def cache_of_call(
    cache: StateCache | None, past_key_values: StateCache | None, others: Mapping[str, Any]
) -> StateCache | None:
    """Return the cache that a call received under one of the two names; None without a cache.

    Args:
        cache: the argument of this name.
        past_key_values: the argument of this name.
        others: further arguments of the call, by name, which must hold no cache.
    """
    if cache is not None and past_key_values is not None:
        raise ValueError("`cache` and `past_key_values` are the same argument; got both. Pass one of them.")
    found = past_key_values if cache is None else cache
    if found is not None and not isinstance(found, StateCache):
        raise TypeError(
            f"`cache` must be a `StateCache`, which holds states of linrec; got a {type(found).__name__}."
        )
    for name, value in others.items():
        if isinstance(value, Cache):
            raise TypeError(
                f"`{name}` must not hold a cache; got a {type(value).__name__}. Pass it as `cache`."
            )
    return found


def _copied(snapshot: Snapshot) -> Snapshot:
    copied: Snapshot = map_tree(torch.clone, snapshot)
    return copied
