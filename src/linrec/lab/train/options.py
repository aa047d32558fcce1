"""The options of `linrec train`: dataclasses that tyro turns into a command line.

The mixer's options depend on the chosen mixer: their dataclass is generated from the keyword-only arguments
of the mixer's `__init__`. A pattern of mixers has such a dataclass for each mixer, under the mixer's name.
"""

import dataclasses
import functools
import inspect
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from linrec import mixers
from linrec.lab.train.config import TrainConfig, model_type, values_from_task
from linrec.models.config import StackConfig, complete_mixer_args, mixer_parameters
from linrec.nn.channel_mixing import ChannelMixing

MOST_USED = {
    "data": ("path", "dataset", "length"),
    "task": ("path", "dataset", "length"),
    "model": ("mixer", "d_model", "n_layers"),
    "optim": ("lr", "warmup_steps"),
    "loop": ("steps", "epochs", "batch_size", "seed", "device", "precision"),
}
"""The options of each section that `linrec train RECIPE --help` shows."""


def options_type(config: TrainConfig, typed: Sequence[str] | None = None) -> type[Any]:
    """Return a dataclass of all options of `linrec train`, with the values of `config` as defaults.

    Args:
        config: the configuration of the recipe or of the run to resume.
        typed: names of mixers that replace the mixers of `config`, with the new mixers' own default
            arguments; None keeps the mixers of `config`.

    Raises:
        ValueError: a mixer does not exist; the message gives the nearest match.
    """
    arguments = config.model.mixer_args
    pattern = tuple(map(mixers.canonical, typed or config.model.mixer_pattern))
    if pattern != config.model.mixer_pattern:
        arguments = complete_mixer_args(_one_or_all(pattern), {})
    # import paths are trusted here: the user typed them, or the caller checked them on loading `config`
    names = typing.cast(Any, (*mixers.names(), *(typed or config.model.mixer_pattern)))
    shape, from_task = type(config.model), values_from_task(config.task)
    hints = typing.get_type_hints(shape)
    # a single name, or a pattern of several names
    hints["mixer"] = tuple[Literal[names], ...]  # type: ignore[valid-type]
    hints["channel_mixing"] = tuple[ChannelMixing, ...]
    model_values = {field.name: getattr(config.model, field.name) for field in dataclasses.fields(shape)}
    model_values["mixer"] = pattern
    model_values["channel_mixing"] = config.model.channel_mixing_pattern
    hints["mixer_args"] = _mixer_options(_one_or_all(pattern), arguments)
    model_values["mixer_args"] = hints["mixer_args"]()
    model_options = _make(
        "ModelOptions",
        _with_shared_arguments(shape),
        [(name, hints[name], value) for name, value in model_values.items() if name not in from_task],
    )
    return _make(
        "Options",
        """Train a model.

        Args:
            out: run folder to create; by default runs/RECIPE.
            resume: run folder to continue, with the configuration stored there.
            init_from: run folder or checkpoint whose model and tokenizer a new run starts from.
            trust_code: allow running the code of a task or mixer that the stored configuration names by an
                import path.
        """,
        [
            ("out", Path | None, None),
            ("resume", Path | None, None),
            ("init_from", Path | None, None),
            ("trust_code", bool, False),
            (config.task.section, type(config.task), config.task),
            ("model", model_options, model_options()),
            ("optim", type(config.optim), config.optim),
            ("loop", type(config.loop), config.loop),
        ],
    )


def most_used(options: type[Any]) -> type[Any]:
    """Return a dataclass with only the most common options, for a help text that fits on a screen.

    Args:
        options: a dataclass from `options_type`.

    Example:
        >>> from linrec.lab.train.recipes import get_recipe
        >>> kind = most_used(options_type(get_recipe("memory-horizon")))
        >>> [field.name for field in dataclasses.fields(kind().optim)]
        ['lr', 'warmup_steps']
    """
    fields: list[tuple[str, Any, Any]] = []
    for name, value in vars(options()).items():
        if not dataclasses.is_dataclass(value):
            fields.append((name, typing.get_type_hints(options)[name], value))
        elif name in MOST_USED:
            hints = typing.get_type_hints(type(value))
            chosen = [(f, hints[f], getattr(value, f)) for f in MOST_USED[name] if hasattr(value, f)]
            doc = inspect.getdoc(type(value)) or ""
            # keep only the summary line, because tyro shows everything above the arguments
            kind = _make(name.capitalize(), f"{doc.splitlines()[0]}\n\n{doc[doc.find('Args:') :]}", chosen)
            fields.append((name, kind, kind()))
    return _make("Options", options.__doc__, fields)


def config_of(options: Any, name: str, section: str) -> TrainConfig:
    """Return the configuration that parsed options describe.

    Args:
        options: an instance of a dataclass from `options_type`.
        name: the recipe's name.
        section: the name of the task's section.

    Raises:
        ValueError: the task or the model refuses the combination of options.
    """
    model = {field.name: getattr(options.model, field.name) for field in dataclasses.fields(options.model)}
    task = getattr(options, section)
    model |= {"mixer_args": dataclasses.asdict(options.model.mixer_args), **values_from_task(task)}
    model["mixer"] = _one_or_all(options.model.mixer)
    return TrainConfig(name, task, model_type(task)(**model), options.optim, options.loop)


def _one_or_all(pattern: Sequence[str]) -> str | tuple[str, ...]:
    # the arguments of a single mixer are not nested under its name
    return pattern[0] if len(pattern) == 1 else tuple(pattern)


def _mixer_options(mixer: str | tuple[str, ...], arguments: Mapping[str, Any]) -> type[Any]:
    """Return a dataclass of a mixer's arguments; for a pattern, a dataclass with a field for each mixer."""
    if isinstance(mixer, str):
        parameters = mixer_parameters(mixer)
        fields = [(name, parameters[name].annotation, value) for name, value in arguments.items()]
        return _make("MixerOptions", mixers.get(mixer).__doc__, fields)
    inner = {name: _mixer_options(name, arguments[name]) for name in dict.fromkeys(mixer)}
    return _make("PatternOptions", None, [(name, kind, kind()) for name, kind in inner.items()])


def _with_shared_arguments(shape: type[StackConfig]) -> str:
    """Return the docstring of a configuration, with the arguments that `StackConfig` describes."""
    own, shared = (inspect.getdoc(kind) or "" for kind in (shape, StackConfig))
    arguments = shared[shared.index("Args:\n") : shared.index("\n\nRaises:")]
    return own.replace("Args:", arguments, 1)


def _make(name: str, doc: str | None, fields: Sequence[tuple[str, Any, Any]]) -> type[Any]:
    # a factory, because dataclasses refuse unhashable defaults
    described = [
        (field, kind, dataclasses.field(default_factory=functools.partial(_same, value)))
        for field, kind, value in fields
    ]
    made = dataclasses.make_dataclass(name, described, frozen=True)
    # tyro reads the help of each option from the docstring
    made.__doc__ = doc
    return made


def _same(value: Any) -> Any:
    return value
