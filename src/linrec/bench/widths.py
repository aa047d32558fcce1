"""Equal parameters: the width at which a model has as many as asked for."""

import bisect
import dataclasses
import functools
import sys
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from linrec.mixers import Mixer
from linrec.models import LanguageModel, ModelConfig, SequenceClassifier, SequenceClassifierConfig

__all__ = ["Sizes", "equally_many", "sizes", "with_parameters"]

STEP = 8
"""Widths are multiples of this, so that heads and groups divide them."""

COARSE = 64
"""Along multiples of this parameters grow with the width, also where blocks are as many as divide a width."""

WIDEST = 4096

TOLERANCE = 0.05
"""Numbers of parameters that differ by this share or less are taken for equal."""


class Sizes(NamedTuple):
    """How large a model is.

    Args:
        parameters: of the whole model.
        state: elements of the state per sequence, of all mixers; those per step where it grows with time.
        grows: how many of these are elements per step.
    """

    parameters: int
    state: int
    grows: int


def sizes(config: ModelConfig | SequenceClassifierConfig) -> Sizes:
    """Return the sizes of the model of a configuration; no memory is taken for it, if its mixer allows that.

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
        sum(mixer.state_size for mixer in mixers),
        sum(mixer.state_size for mixer in mixers if _starts_empty(mixer)),
    )


def equally_many(parameters: int, other: int) -> bool:
    """Tell whether models of so many parameters may be compared with each other.

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
        # a mixer of the user's may look at its numbers, and there are none without memory
        return build()


def _starts_empty(mixer: Mixer) -> bool:
    try:
        state = mixer.init_state(1)
    except Exception:
        # training needs none
        return False
    return any(isinstance(leaf, Tensor) and not leaf.numel() for leaf in tree_leaves(state))


def with_parameters(
    config: ModelConfig | SequenceClassifierConfig, n: int
) -> ModelConfig | SequenceClassifierConfig:
    """Return the configuration whose number of parameters is nearest to n.

    The width is the multiple of 8 that comes nearest while the hidden width of the channel mixing keeps its
    ratio to it; then the hidden width makes up what is missing or too much. A width that a mixer cannot have
    is left out.

    Args:
        config: the model; its width says that ratio, and nothing else.
        n: parameters, embeddings and head included.

    Raises:
        Exception: the mixer can have none of the widths; its own error for the last of them.

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
            # whatever it is that a mixer says of a width: users' assert that heads divide it
            return None

    def at_least(place: int) -> int:
        # of the first that the mixer can have
        counts = (parameters(wider) for wider in coarse[place:])
        return next((count for count in counts if count is not None), sys.maxsize)

    coarse = [STEP, *range(COARSE, WIDEST + 1, COARSE)]
    place = bisect.bisect_left(range(len(coarse)), n, key=at_least)
    # the nearest is between that one and the one before
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
