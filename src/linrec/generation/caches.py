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

__all__ = [
    "CacheRings",
    "bytes_of_state",
    "has_rings",
    "with_cache_length",
    "with_places",
    "with_rings",
    "without_rings",
]

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
        place = torch.full((1,), steps % slots, dtype=torch.int64, device=cache.k.device)
        return _ring(slots, steps, cache)._replace(place=place)

    def _in_order(self, n: int, cache: AttentionCache) -> AttentionCache:
        if cache.place is None:
            return cache
        steps = self._steps[n] + self.taken
        found = _in_order(_kept(self._windows[n], steps), steps, cache)
        return found if n in self._masked else found._replace(alive=None)


def has_rings(model: LanguageModel) -> bool:
    """Return whether all states that grow are caches that may be rings."""
    return _is_plain(model) and all(_has_cache(mixer) or not mixer.state_grows for mixer in model.mixers)


def with_rings(model: LanguageModel, layers: State, length: int, taken: int) -> State:
    """Return the state with caches as rings without a `place`: the next slot of all is `taken`, modulo slots.

    Args:
        model: the model.
        layers: a state, with caches of at most `length` steps.
        length: number of slots; caches of attention with a window have a slot for each step of the window.
        taken: number of steps that the rings have taken.
    """
    return _with_caches(model, layers, lambda mixer, cache: _ring(mixer.window or length, taken, cache))


def without_rings(model: LanguageModel, layers: State, steps: int, taken: int) -> State:
    """Return the state with caches of the newest steps, at most of the window, from those of `with_rings`."""
    return _with_caches(model, layers, lambda mixer, ring: _in_order(_kept(mixer.window, steps), taken, ring))


def with_places(model: LanguageModel, layers: State, places: Callable[[int], Tensor]) -> State:
    """Return the state with the next slot of rings, from their numbers of slots."""
    return _with_caches(model, layers, lambda _, ring: ring._replace(place=places(ring.k.shape[1])))


def with_cache_length(model: LanguageModel, layers: State, steps: int) -> State:
    """Return the state with caches of one length, so that rows that read different numbers of steps fit.

    The steps that no row has read, which come first, are not alive. A cache of attention with a window gets
    the steps that the window keeps.

    Args:
        model: the model; with a memory across the stack or pools, the state is returned as it is.
        layers: a state of any rows.
        steps: the most steps that a row has read.
    """
    return _with_caches(model, layers, lambda mixer, cache: _of_length(_kept(mixer.window, steps), cache))


def _with_caches(
    model: LanguageModel, layers: State, change: Callable[[Attention, AttentionCache], AttentionCache]
) -> State:
    if not _is_plain(model):
        return layers
    found = list(layers)
    for n, mixer in enumerate(model.mixers):
        if _has_cache(mixer):
            found[n] = _mapped(layers[n], partial(change, mixer))
    return tuple(found)


def _kept(window: int | None, steps: int) -> int:
    return steps if window is None else min(steps, window - 1)


def _ring(slots: int, taken: int, cache: AttentionCache) -> AttentionCache:
    return _moved(_of_length(slots, cache), lambda part: part.roll(taken, 1))


def _in_order(steps: int, taken: int, ring: AttentionCache) -> AttentionCache:
    slots = torch.arange(taken - steps, taken, device=ring.k.device) % ring.k.shape[1]
    return _moved(ring, lambda part: part.index_select(1, slots))


def _moved(cache: AttentionCache, move: Callable[[Tensor], Tensor]) -> AttentionCache:
    alive = None if cache.alive is None else move(cache.alive)
    return AttentionCache(move(cache.k), move(cache.v), None, None, alive)


def bytes_of_state(model: LanguageModel, steps: int) -> int:
    """Return the most bytes of the state of a row that has read so many steps, without segments."""
    parts = [part for block in model.blocks for part in (block.mixer, block.channel_mixing)]
    return sum(_bytes_of(mixer, steps) for mixer in parts if isinstance(mixer, Mixer))


def _bytes_of(mixer: Mixer, steps: int) -> int:
    if isinstance(mixer, Attention) and mixer.causal:
        steps = _kept(mixer.window, steps)
        if mixer.bounded is not None:
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
