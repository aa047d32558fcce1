"""Equal parameters: choose the width at which a model has a given number of parameters."""

import bisect
import dataclasses
import functools
import sys
from typing import NamedTuple

import torch

from linrec.mixers import Mixer
from linrec.models import (
    LanguageModel,
    ModelConfig,
    SequenceClassifier,
    SequenceClassifierConfig,
    StackMemory,
)
from linrec.trees import leaves

__all__ = ["Sizes", "equally_many", "sizes", "with_parameters"]

STEP = 8
"""Widths are multiples of this, so that heads and groups divide them."""

COARSE = 64
"""Step of the coarse search: along its multiples, parameters grow with the width.

At other widths they may not, for mixers whose number of blocks is a divisor of the width.
"""

WIDEST = 4096

TOLERANCE = 0.05
"""Largest relative difference between two numbers of parameters that count as equal."""


class Sizes(NamedTuple):
    """The sizes of a model.

    Args:
        parameters: number of parameters of the whole model.
        state: state elements per sequence, summed over all mixers and a memory across them; a cache that
            grows with time counts its elements per step.
        grows: the part of `state` that is elements per step.
    """

    parameters: int
    state: int
    grows: int


def sizes(config: ModelConfig | SequenceClassifierConfig) -> Sizes:
    """Return the sizes of a configuration's model, built on the meta device if its mixer supports it.

    Example:
        >>> sizes(ModelConfig(vocab_size=10, d_model=8, n_layers=1))
        Sizes(parameters=2762, state=8, grows=0)
        >>> sizes(ModelConfig(vocab_size=10, d_model=8, n_layers=1, mixer="attention")).grows
        16
    """
    with torch.random.fork_rng(devices=[]):
        model = _built(config)
    mixers = [module for module in model.modules() if isinstance(module, Mixer)]
    return Sizes(
        sum(parameter.numel() for parameter in model.parameters()),
        sum(module.state_size for module in model.modules() if isinstance(module, (Mixer, StackMemory))),
        sum(mixer.state_size for mixer in mixers if _starts_empty(mixer)),
    )


def equally_many(parameters: int, other: int) -> bool:
    """Return whether two numbers of parameters are close enough for a fair comparison of models.

    Example:
        >>> equally_many(24_000, 23_400), equally_many(24_000, 600_000)
        (True, False)
    """
    return abs(parameters - other) <= TOLERANCE * max(parameters, other)


def _built(config: ModelConfig | SequenceClassifierConfig) -> LanguageModel | SequenceClassifier:
    def build() -> LanguageModel | SequenceClassifier:
        return LanguageModel(config) if isinstance(config, ModelConfig) else SequenceClassifier(config)

    try:
        with torch.device("meta"):
            return build()
    except ValueError:
        raise
    except Exception:
        # a user's mixer may read parameter values, which the meta device does not have
        return build()


def _starts_empty(mixer: Mixer) -> bool:
    if mixer.segment_length is not None:
        # the cache of a segment is bounded
        return False
    try:
        state = mixer.init_state(1)
    except Exception:
        # training does not call `init_state`, so a user's mixer may lack it
        return False
    return any(not leaf.numel() for leaf in leaves(state))


def with_parameters(
    config: ModelConfig | SequenceClassifierConfig, n: int
) -> ModelConfig | SequenceClassifierConfig:
    """Return the configuration whose number of parameters is nearest to n.

    First, the model width is set to the multiple of 8 that comes nearest to n, with the hidden width of the
    channel mixer at a fixed ratio to the model width. Then the hidden width alone is adjusted to come nearer
    to n. Widths that the mixer does not support are skipped.

    Args:
        config: the model; its widths define the ratio of hidden width to model width.
        n: number of parameters, embeddings and head included.

    Raises:
        Exception: the mixer supports no width; the exception is the mixer's own.

    Example:
        >>> config = with_parameters(ModelConfig(vocab_size=10, n_layers=1), 5000)
        >>> config.d_model, config.d_channel_mixing, sizes(config).parameters
        (24, 27, 4981)
    """
    ratio = config.d_channel_mixing / config.d_model

    def of(width: int) -> ModelConfig | SequenceClassifierConfig:
        return dataclasses.replace(config, d_model=width, d_channel_mixing=max(1, round(ratio * width)))

    @functools.cache
    def parameters(width: int) -> int | None:
        try:
            return sizes(of(width)).parameters
        except Exception:
            # any exception: users' mixers may use `assert` to check that the heads divide the width
            return None

    def at_least(place: int) -> int:
        # the parameters at the first width from `place` on that the mixer supports
        counts = (parameters(wider) for wider in coarse[place:])
        return next((count for count in counts if count is not None), sys.maxsize)

    coarse = [STEP, *range(COARSE, WIDEST + 1, COARSE)]
    place = bisect.bisect_left(range(len(coarse)), n, key=at_least)
    # the nearest width is between this coarse width and the coarse width before it
    widest = next((width for width in coarse[place:] if parameters(width) is not None), WIDEST)
    narrowest = next((width for width in reversed(coarse[:place]) if parameters(width) is not None), STEP)
    between = range(narrowest, widest + 1, STEP)
    possible = [width for width in reversed(between) if parameters(width) is not None]
    if not possible:
        sizes(of(STEP))
    nearest = of(min(possible, key=lambda width: abs((parameters(width) or 0) - n)))
    count = sizes(nearest).parameters

    def hidden(units: int) -> ModelConfig | SequenceClassifierConfig:
        return dataclasses.replace(nearest, d_channel_mixing=max(1, nearest.d_channel_mixing + units))

    of_a_unit = sizes(hidden(1)).parameters - count
    return hidden(round((n - count) / of_a_unit)) if of_a_unit else nearest
