"""The options of `linrec train`: a configuration as dataclasses that tyro can make a command line of.

The mixer's arguments are not fixed: they are the keyword-only arguments of the chosen mixer's `__init__`, so
the dataclass of its options is made from its signature.
"""

import dataclasses
import functools
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from linrec import mixers
from linrec.models import ModelConfig
from linrec.train.config import TrainConfig, mixer_parameters

# the task says these two
_FROM_TASK = ("vocab_size", "n_outputs")


def options_type(config: TrainConfig) -> type[Any]:
    """Return a dataclass with the configuration's sections, its values as defaults, and --out and --resume.

    Args:
        config: the recipe's configuration, or that of the run to resume.
    """
    mixer = config.model.mixer
    parameters = mixer_parameters(mixer)
    mixer_options = _make(
        "MixerOptions",
        mixers.get(mixer).__doc__,
        [(name, parameters[name].annotation, value) for name, value in config.model.mixer_args.items()],
    )
    hints = typing.get_type_hints(ModelConfig)
    hints["mixer"] = Literal[tuple(mixers.names())]
    model_values = {
        field.name: getattr(config.model, field.name) for field in dataclasses.fields(ModelConfig)
    }
    model_values["mixer_args"], hints["mixer_args"] = mixer_options(), mixer_options
    model_options = _make(
        "ModelOptions",
        ModelConfig.__doc__,
        [(name, hints[name], value) for name, value in model_values.items() if name not in _FROM_TASK],
    )
    return _make(
        "Options",
        """What to train.

        Args:
            out: run folder to make; by default runs/RECIPE.
            resume: run folder to continue, with the configuration stored there.
        """,
        [
            ("out", Path | None, None),
            ("resume", Path | None, None),
            (config.task.section, type(config.task), config.task),
            ("model", model_options, model_options()),
            ("optim", type(config.optim), config.optim),
            ("loop", type(config.loop), config.loop),
        ],
    )


def config_of(options: Any, name: str, section: str) -> TrainConfig:
    """Return the configuration that parsed options stand for.

    Args:
        options: an instance of what `options_type` made.
        name: the recipe's name.
        section: the name of the task's section.

    Raises:
        ValueError: a combination that the task or the model refuses.
    """
    model = {field.name: getattr(options.model, field.name) for field in dataclasses.fields(options.model)}
    # the task puts the real size in, or its data do when they are read
    model |= {"mixer_args": dataclasses.asdict(options.model.mixer_args), "vocab_size": 1}
    task = getattr(options, section)
    return TrainConfig(name, task, ModelConfig(**model), options.optim, options.loop)


def option_names(options: type[Any], prefix: str = "--") -> list[str]:
    """Return all options as users type them, such as "--optim.weight-decay".

    Example:
        >>> from linrec.train.recipes import get_recipe
        >>> names = option_names(options_type(get_recipe("memory-horizon")))
        >>> [name for name in names if "mixer-args.tr" in name]
        ['--model.mixer-args.transition', '--model.mixer-args.transition-weight-scale']
    """
    names = []
    hints = typing.get_type_hints(options)
    for field in dataclasses.fields(options):
        name = prefix + field.name.replace("_", "-")
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            names += option_names(typing.cast(type, kind), f"{name}.")
        else:
            names.append(name)
            if kind is bool:
                names.append(f"{prefix}no-{field.name.replace('_', '-')}")
    return names


def _make(name: str, doc: str | None, fields: Sequence[tuple[str, Any, Any]]) -> type[Any]:
    # a factory, since dataclasses refuse some defaults that cannot be hashed
    described = [
        (field, kind, dataclasses.field(default_factory=functools.partial(_same, value)))
        for field, kind, value in fields
    ]
    made = dataclasses.make_dataclass(name, described, frozen=True)
    # tyro takes the help of each option from here
    made.__doc__ = doc
    return made


def _same(value: Any) -> Any:
    return value
