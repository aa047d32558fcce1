"""Equal parameters: the width at which a model has as many as asked for."""

import bisect
import dataclasses
import functools
import itertools
import sys
from typing import NamedTuple

import torch

from linrec.mixers import Mixer
from linrec.models import LanguageModel, ModelConfig, SequenceClassifier, SequenceClassifierConfig

__all__ = ["Sizes", "sizes", "with_parameters"]

STEP = 8
"""Widths are multiples of this, so that heads and groups divide them."""

WIDEST = 4096


class Sizes(NamedTuple):
    """How large a model is.

    Args:
        parameters: of the whole model.
        state: elements of the state per sequence, of all mixers; those per step where it grows with time.
    """

    parameters: int
    state: int


def sizes(config: ModelConfig | SequenceClassifierConfig) -> Sizes:
    """Return the sizes of the model of a configuration; no memory is taken for it.

    Example:
        >>> sizes(ModelConfig(vocab_size=10, d_model=8, n_layers=1))
        Sizes(parameters=2762, state=8)
    """
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = LanguageModel(config) if isinstance(config, ModelConfig) else SequenceClassifier(config)
    return Sizes(
        sum(parameter.numel() for parameter in model.parameters()),
        sum(module.state_size for module in model.modules() if isinstance(module, Mixer)),
    )


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
        ValueError: the mixer can have none of the widths; with its own words for the last of them.

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
        except ValueError:
            return None

    def at_least(width: int) -> int:
        # of the first that the mixer can have
        counts = (parameters(wider) for wider in range(width, WIDEST + 1, STEP))
        return next((count for count in counts if count is not None), sys.maxsize)

    widths = range(STEP, WIDEST + 1, STEP)
    place = bisect.bisect_left(widths, n, key=at_least)
    # the nearest is that one or the one before
    wider = (width for width in widths[place:] if parameters(width) is not None)
    narrower = (width for width in reversed(widths[:place]) if parameters(width) is not None)
    possible = [*itertools.islice(wider, 1), *itertools.islice(narrower, 1)]
    if not possible:
        sizes(of(STEP))
    nearest = of(min(possible, key=lambda width: abs((parameters(width) or 0) - n)))
    count = sizes(nearest).parameters

    def hidden(units: int) -> ModelConfig | SequenceClassifierConfig:
        return dataclasses.replace(nearest, d_channel_mixing=max(1, nearest.d_channel_mixing + units))

    of_a_unit = sizes(hidden(1)).parameters - count
    return hidden(round((n - count) / of_a_unit)) if of_a_unit else nearest
