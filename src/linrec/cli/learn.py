"""`linrec learn STREAM`: learn online from a stream."""

import ast
import dataclasses
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from linrec.cli.options import LearnOptions
from linrec.cli.output import say
from linrec.cli.parsing import one_line_errors, parse
from linrec.errors import ConfigError, RunFolderError, UntrustedCodeError
from linrec.lab.streams.learn import LearnConfig, Learning, learn, stored_config, trained_model
from linrec.lab.train import load_run
from linrec.lab.train.fabric import device_of, program

ARGUMENTS = ("learner_args", "stream_args", "mixer_args")
# the other fields of LearnConfig are options of the same name
FIELDS = tuple(field.name for field in dataclasses.fields(LearnConfig) if field.name not in ARGUMENTS)


def run(words: list[str]) -> int:
    """Run `linrec learn`."""
    options = parse(LearnOptions, words, "linrec learn")
    if options.resume is not None:
        if options.stream or options.init_from is not None:
            raise ConfigError(
                "--resume goes on with the stream and the model of the run; leave out STREAM and --init-from."
            )
        config, folder = stored_config(options.resume), options.resume
    elif not options.stream:
        raise ConfigError(
            "name a stream first, or a run folder after --resume; `linrec learn --help` lists them."
        )
    else:
        with one_line_errors():
            config = _config(options)
        folder = options.out or Path("runs") / f"learn-{Path(options.stream).stem or 'input'}"
    _require_trust(config, options)
    model = None if options.init_from is None else _start(options)
    with one_line_errors():
        result = learn(
            config,
            folder,
            steps=options.steps,
            resume=options.resume is not None,
            model=model,
            device=device_of(options.device),
            command=shlex.join([*program(), "learn", *words]),
            told=_told,
        )
    bounds = ", ".join(f"{name} {loss:.4g}" for name, loss in result["bounds"].items())
    say(f"loss {result['loss']:.4f}, at the end {result['fading']:.4f}{f' ({bounds})' if bounds else ''}")
    speed, size = f"{result['microseconds_per_step']:.0f} microseconds", f"{result['memory_bytes']:,} bytes"
    say(f"{result['steps']:,} steps at {speed}, {size} of memory; all in {folder}")
    return 0


def _config(options: LearnOptions) -> LearnConfig:
    given: dict[str, Any] = {name: getattr(options, name) for name in FIELDS}
    given |= {name: arguments(name, getattr(options, name)) for name in ARGUMENTS}
    return LearnConfig(**given)


def arguments(option: str, words: Sequence[str]) -> Mapping[str, Any]:
    """Return the arguments that words such as "r_min=0.9" give; what is no Python value is a text.

    Example:
        >>> arguments("mixer_args", ["r_min=0.9", "candidate=linear"])
        {'r_min': 0.9, 'candidate': 'linear'}
    """
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name.isidentifier() and equals):
            raise ConfigError(f"--{option.replace('_', '-')} must be name=value; got {word!r}.")
        try:
            found[name] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            found[name] = value
    return found


def _require_trust(config: LearnConfig, options: LearnOptions) -> None:
    """Raise unless a stored run's mixer is one of linrec, or the user trusts its code."""
    if options.resume is not None and ":" in config.mixer and not options.trust_code:
        raise UntrustedCodeError(
            f"{options.resume} would import {config.mixer!r}; pass --trust-code if you trust it."
        )


def _start(options: LearnOptions) -> nn.Module:
    """Return the trained model of --init-from."""
    folder = options.init_from
    assert folder is not None
    try:
        config = stored_config(folder)
    except RunFolderError:
        return load_run(folder, trust_code=options.trust_code).model()
    if ":" in config.mixer and not options.trust_code:
        raise UntrustedCodeError(
            f"{folder} would import {config.mixer!r}; pass --trust-code if you trust it."
        )
    return trained_model(folder, config)


def _told(learning: Learning) -> None:
    say(
        f"step {learning.steps:,}: loss {learning.scores.curve[-1]:.4f}, fading {learning.scores.fading:.4f}",
        file=sys.stderr,
    )
