"""Room in the caches of attention, so that a cache that grows has one shape for many steps."""

import copy
from collections.abc import Callable
from typing import cast

from torch import nn
from torch.nn import functional

from linrec.mixers import Mixer, State
from linrec.mixers.attention import Attention, AttentionState
from linrec.models import Block, LanguageModel
from linrec.ops.attention import AttentionCache

# steps at least, since steps are compiled and captured again when the room is used up
ROOM = 512


class Room:
    """Caches of constant shape: hidden steps come before the steps of a cache, and each new step drops one.

    The caches are those of attention without a window. Such a cache of s steps gets max(512, s / 2) hidden
    steps, and the attention gets a window of that many steps, which only drops hidden steps.

    Args:
        model: the model, which is not modified.

    Attributes:
        left: number of hidden steps. If it is 0, `made` makes room again.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._layers = [n for n, mixer in enumerate(model.mixers) if _grows(mixer)]
        self._masked = True
        self.left = 0

    @classmethod
    def of(cls, model: LanguageModel) -> "Room | None":
        """Return the room of a model, or None if no cache of it grows."""
        return cls(model) if model.memory is None and any(map(_grows, model.mixers)) else None

    def made(self, layers: tuple[State, ...]) -> tuple[LanguageModel, tuple[State, ...]]:
        """Return the model for steps with caches that have room, and its state.

        Args:
            layers: the state, with caches of at least one step, without hidden steps.
        """
        cache = _cache(layers[self._layers[0]])
        steps = cache.k.shape[1]
        # of caches that had room before, only the room made a mask
        self._masked &= cache.alive is not None
        self.left = max(ROOM, steps // 2)
        model = copy.copy(self._model)
        # a shallow copy shares the dictionary of modules
        model._modules = dict(model._modules)
        blocks = list(model.blocks)
        for n in self._layers:
            blocks[n] = _windowed(cast(Block, blocks[n]), steps + self.left + 1)
        model.blocks = nn.ModuleList(blocks)
        return model, self._changed(layers, self._padded)

    def without(self, layers: tuple[State, ...]) -> tuple[State, ...]:
        """Return the state without hidden steps."""
        return self._changed(layers, self._stripped)

    def _changed(
        self, layers: tuple[State, ...], change: Callable[[AttentionCache], AttentionCache]
    ) -> tuple[State, ...]:
        return tuple(_mapped(layer, change) if n in self._layers else layer for n, layer in enumerate(layers))

    def _padded(self, cache: AttentionCache) -> AttentionCache:
        alive = cache.k.new_ones(cache.k.shape[:2]).bool() if cache.alive is None else cache.alive
        k, v = (functional.pad(x, (0, 0, 0, 0, self.left, 0)) for x in (cache.k, cache.v))
        return cache._replace(k=k, v=v, alive=functional.pad(alive, (self.left, 0), value=False))

    def _stripped(self, cache: AttentionCache) -> AttentionCache:
        alive = cache.alive[:, self.left :] if self._masked and cache.alive is not None else None
        return cache._replace(k=cache.k[:, self.left :], v=cache.v[:, self.left :], alive=alive)


def _grows(mixer: Mixer) -> bool:
    return type(mixer) is Attention and mixer.window is None


def _windowed(block: Block, window: int) -> Block:
    """Return a copy of a block, which shares its tensors, with a window for its attention."""
    mixer = copy.copy(cast(Attention, block.mixer))
    mixer.window = window
    found = copy.copy(block)
    found._modules = dict(block._modules)
    found.mixer = mixer
    return found


def _cache(layer: State) -> AttentionCache:
    return layer.cache if isinstance(layer, AttentionState) else layer[0].cache


def _mapped(layer: State, change: Callable[[AttentionCache], AttentionCache]) -> State:
    if isinstance(layer, AttentionState):
        return layer._replace(cache=change(layer.cache))
    # beside the state of a channel mixing
    return _mapped(layer[0], change), layer[1]
