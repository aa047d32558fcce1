"""Caches of attention in a model's state: rings that steps write in place, and caches of equal length."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.nn import functional

from linrec.mixers import Mixer, State
from linrec.mixers.attention import Attention, AttentionState
from linrec.models import LanguageModel
from linrec.ops.attention import AttentionCache
from linrec.trees import leaves

__all__ = ["CacheRings", "bytes_of_state", "with_cache_length"]

# steps at least, since steps are compiled and captured again when the room is used up
ROOM = 512
# kernels read masks of such lengths without a copy
ALIGNED = 8


class CacheRings:
    """Caches of attention as rings, which steps write in place.

    A cache of s steps gets slots for max(512, s / 2) further steps. A cache of attention with a window gets a
    slot for each step of the window, and is never full.

    Args:
        model: the model.

    Attributes:
        taken: number of steps since `made`.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._windows: dict[int, int | None] = {
            n: mixer.window for n, mixer in enumerate(model.mixers) if _has_cache(mixer)
        }
        self._steps: dict[int, int] = {}
        self._masked: set[int] = set()
        self._size: int | None = 0
        self.taken = 0

    @classmethod
    def of(cls, model: LanguageModel) -> "CacheRings | None":
        """Return the rings of a model, or None if it has no attention with a cache."""
        return cls(model) if _is_plain(model) and any(map(_has_cache, model.mixers)) else None

    @property
    def full(self) -> bool:
        """Whether `made` must make room before the next step."""
        return self.taken == self._size

    def made(self, layers: tuple[State, ...]) -> tuple[State, ...]:
        """Return a state with rings.

        Args:
            layers: a state after at least one step, with or without rings.
        """
        layers = self.without(layers)
        caches = {n: _cache(layers[n]) for n in self._windows}
        self._steps = {n: cache.k.shape[1] for n, cache in caches.items()}
        self._masked = {n for n, cache in caches.items() if cache.alive is not None}
        grown = [self._steps[n] for n, window in self._windows.items() if window is None]
        self._size, self.taken = max(ROOM, max(grown) // 2) if grown else None, 0
        return self._changed(layers, self._ring)

    def without(self, layers: tuple[State, ...]) -> tuple[State, ...]:
        """Return the state with caches as attention returns them, which later steps do not modify."""
        return self._changed(layers, self._in_order)

    def slots(self, layers: tuple[State, ...]) -> set[int]:
        """Return the ids of the tensors in a state that steps write in place."""
        rings = [cache for n in self._windows if (cache := _cache(layers[n])).place is not None]
        return {id(x) for ring in rings for x in (ring.k, ring.v, ring.alive)}

    def _changed(
        self, layers: tuple[State, ...], change: Callable[[int, AttentionCache], AttentionCache]
    ) -> tuple[State, ...]:
        found = list(layers)
        for n in self._windows:
            found[n] = _mapped(layers[n], partial(change, n))
        return tuple(found)

    def _ring(self, n: int, cache: AttentionCache) -> AttentionCache:
        steps, slots = self._steps[n], self._windows[n]
        if slots is None:
            slots = -(-(steps + (self._size or 0)) // ALIGNED) * ALIGNED
        alive = cache.k.new_ones(cache.k.shape[:2]).bool() if cache.alive is None else cache.alive
        k, v = (functional.pad(x, (0, 0, 0, 0, 0, slots - steps)) for x in cache[:2])
        place = torch.full((1,), steps % slots, dtype=torch.int64, device=k.device)
        return AttentionCache(k, v, None, None, functional.pad(alive, (0, slots - steps), value=False), place)

    def _in_order(self, n: int, cache: AttentionCache) -> AttentionCache:
        if cache.place is None:
            return cache
        steps, window = self._steps[n] + self.taken, self._windows[n]
        kept = steps if window is None else min(steps, window - 1)
        slots = torch.arange(steps - kept, steps, device=cache.k.device) % cache.k.shape[1]
        k, v = (x.index_select(1, slots) for x in cache[:2])
        alive = None if cache.alive is None else cache.alive.index_select(1, slots)
        return AttentionCache(k, v, None, None, alive if n in self._masked else None)


def with_cache_length(model: LanguageModel, layers: State, steps: int) -> State:
    """Return the state with caches of one length, so that rows that read different numbers of steps fit.

    The steps that no row has read, which come first, are not alive. A cache of attention with a window gets
    the steps that the window keeps.

    Args:
        model: the model; with a memory across the stack or pools, the state is returned as it is.
        layers: a state of any rows.
        steps: the most steps that a row has read.
    """
    if not _is_plain(model):
        return layers
    found = list(layers)
    for n, mixer in enumerate(model.mixers):
        if _has_cache(mixer):
            length = steps if mixer.window is None else min(steps, mixer.window - 1)
            found[n] = _mapped(layers[n], partial(_of_length, length))
    return tuple(found)


def bytes_of_state(model: LanguageModel, steps: int) -> int:
    """Return the most bytes of the state of a row that has read so many steps, without segments."""
    parts = [part for block in model.blocks for part in (block.mixer, block.channel_mixing)]
    return sum(_bytes_of(mixer, steps) for mixer in parts if isinstance(mixer, Mixer))


def _bytes_of(mixer: Mixer, steps: int) -> int:
    if isinstance(mixer, Attention) and mixer.causal:
        if mixer.window is not None:
            steps = min(steps, mixer.window - 1)
        elif mixer.bounded is not None:
            steps = min(steps, mixer.bounded.size)
    parts = leaves(mixer.init_state(1, device="meta"))
    grows = any(not part.numel() for part in parts)
    # beside keys and values, a flag for each step
    return sum(_bytes_with(part, steps) for part in parts) + (steps if grows else 0)


def _bytes_with(part: Tensor, steps: int) -> int:
    """Return the bytes of a part of a state when its empty axis has so many steps."""
    return part.element_size() * math.prod(size or steps for size in part.shape)


def _of_length(length: int, cache: AttentionCache) -> AttentionCache:
    missing = length - cache.k.shape[1]
    if missing == 0 and cache.alive is not None:
        return cache
    alive = cache.k.new_ones(cache.k.shape[:2], dtype=torch.bool) if cache.alive is None else cache.alive
    k, v = (functional.pad(x, (0, 0, 0, 0, missing, 0)) for x in cache[:2])
    return AttentionCache(k, v, None, None, functional.pad(alive, (missing, 0), value=False))


def _is_plain(model: LanguageModel) -> bool:
    return model.memory is None and model.pooling is None


def _has_cache(mixer: Mixer) -> TypeGuard[Attention]:
    # attention with xPos or a policy keeps more than keys and values
    return type(mixer) is Attention and mixer.causal and mixer.recurrence == "softmax_attention"


def _cache(layer: Any) -> Any:
    return layer.cache if isinstance(layer, AttentionState) else layer[0].cache


def _mapped(layer: State, change: Callable[[AttentionCache], AttentionCache]) -> State:
    if isinstance(layer, AttentionState):
        return layer._replace(cache=change(layer.cache))
    # beside the state of a channel mixing, and the source of a decoder
    return _mapped(layer[0], change), *layer[1:]
