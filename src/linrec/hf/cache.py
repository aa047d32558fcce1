"""The cache of transformers that holds the states of a linrec model."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from linrec.trees import leaves, map_tree

__all__ = ["StateCache", "StateLayer"]


class StateLayer(CacheLayerMixin):
    """The state of one block, of any structure, with the batch first in every tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.state: Any = None
        self.seen = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Refuse keys and values."""
        raise TypeError("a `StateCache` holds states of linrec, not keys and values.")

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Refuse keys and values."""
        raise TypeError("a `StateCache` holds states of linrec, not keys and values.")

    def write(self, state: Any, steps: int) -> None:
        """Replace the state by the state after `steps` further steps."""
        self.state, self.seen, self.is_initialized = state, self.seen + steps, True

    def get_seq_length(self) -> int:
        """Return the number of steps that the state has seen."""
        return self.seen

    def get_max_length(self) -> int:
        """Return -1: there is no longest sequence."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length of a mask over all steps, and its offset."""
        return self.seen + query_length, 0

    def apply(self, function: Callable[[Tensor], Tensor]) -> None:
        """Apply a function to every tensor of the state."""
        self.state = map_tree(function, self.state)

    def reset(self) -> None:
        """Forget everything."""
        self.state, self.seen, self.is_initialized = None, 0, False

    def offload(self) -> None:
        """Move the state to the CPU."""
        self.devices = [tensor.device for tensor in leaves(self.state)]
        self.apply(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move the state back to where it was."""
        devices = iter(getattr(self, "devices", ()))
        self.apply(lambda tensor: tensor.to(next(devices), non_blocking=True))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the sequences of these indices, as beam search asks."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Take the sequences of these indices."""
        self.apply(lambda tensor: tensor.index_select(0, indices.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence."""
        self.apply(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def crop(self, max_length: int) -> None:
        """Refuse to go back: a state has no past. `StateCache.restore` goes back to a snapshot."""
        if max_length not in (0, self.seen):
            raise ValueError(
                f"a state cannot be cut to {max_length} of its {self.seen} steps; restore a snapshot of "
                "the cache."
            )


class StateCache(Cache):
    """The states of all blocks; what `past_key_values` is for linrec's models.

    Args:
        n_layers: blocks of the model.

    Example:
        >>> cache = StateCache(2)
        >>> cache.write((torch.zeros(3, 4), None), steps=5)
        >>> cache.get_seq_length(), cache.states[0].shape
        (5, torch.Size([3, 4]))
        >>> before = cache.snapshot()
        >>> cache.write((torch.ones(3, 4), None), steps=1)
        >>> cache.restore(before)
        >>> cache.get_seq_length(), cache.states[0].sum()
        (5, tensor(0.))
    """

    def __init__(self, n_layers: int) -> None:
        super().__init__(layers=[StateLayer() for _ in range(n_layers)])

    @property
    def states(self) -> tuple[Any, ...] | None:
        """The states of all blocks; None before the first step."""
        if not self.layers[0].is_initialized:
            return None
        return tuple(layer.state for layer in self.layers)

    def write(self, states: tuple[Any, ...], steps: int) -> None:
        """Replace the states by the states after `steps` further steps."""
        for layer, state in zip(self.layers, states, strict=True):
            layer.write(state, steps)

    def snapshot(self) -> tuple[int, tuple[Any, ...] | None]:
        """Return the number of steps and a copy of the states, for `restore`."""
        return self.get_seq_length(), map_tree(torch.clone, self.states)

    def restore(self, snapshot: tuple[int, tuple[Any, ...] | None]) -> None:
        """Go back to a snapshot, which later steps do not modify."""
        steps, states = snapshot
        for place, layer in enumerate(self.layers):
            layer.reset()
            if states is not None:
                layer.write(map_tree(torch.clone, states[place]), steps)
