"""`linrec learn STREAM`: learn online from a stream."""

import dataclasses
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from linrec.cli.options import LearnOptions
from linrec.cli.output import say
from linrec.cli.parsing import named_arguments, one_line_errors
from linrec.errors import ConfigError, RunFolderError
from linrec.lab.streams.learn import LearnConfig, Learning, learn, stored_config, trained_model
from linrec.lab.train import load_run
from linrec.lab.train.fabric import device_of, program

ARGUMENTS = ("learner_args", "stream_args", "mixer_args", "model_args")
# the fields of LearnConfig that describe the model
MODEL = ("mixer", "mixer_args", "d_model", "n_layers", "model_args", "language_model")
# options of the same name
FIELDS = tuple(
    field.name
    for field in dataclasses.fields(LearnConfig)
    if field.name not in (*ARGUMENTS, "language_model")
)


def run(options: LearnOptions, words: Sequence[str]) -> int:
    """Run `linrec learn`."""
    if options.resume is not None:
        if options.stream or options.init_from is not None:
            raise ConfigError(
                "--resume goes on with the stream and the model of the run; leave out STREAM and --init-from."
            )
        config = stored_config(options.resume, trust_code=options.trust_code)
        folder = options.resume
    elif not options.stream:
        raise ConfigError(
            "name a stream first, or a run folder after --resume; `linrec learn --help` lists them."
        )
    else:
        given: dict[str, Any] = {name: getattr(options, name) for name in FIELDS}
        given |= {name: named_arguments(name, getattr(options, name)) for name in ARGUMENTS}
        with one_line_errors():
            config = LearnConfig(**given)
        folder = options.out or Path("runs") / f"learn-{Path(options.stream).stem or 'input'}"
    model = None
    if options.init_from is not None:
        config, model = _continued(config, options)
    with one_line_errors():
        result = learn(
            config,
            folder,
            steps=options.steps,
            resume=options.resume is not None,
            model=model,
            device=device_of(options.device),
            command=shlex.join([*program(), *words]),
            told=_told,
        )
    bounds = ", ".join(f"{name} {loss:.4g}" for name, loss in result["bounds"].items())
    say(f"loss {result['loss']:.4f}, at the end {result['fading']:.4f}{f' ({bounds})' if bounds else ''}")
    speed, size = f"{result['microseconds_per_step']:.0f} microseconds", f"{result['memory_bytes']:,} bytes"
    say(f"{result['steps']:,} steps at {speed}, {size} of memory; all in {folder}")
    return 0


def _continued(config: LearnConfig, options: LearnOptions) -> tuple[LearnConfig, nn.Module]:
    """Return the configuration with the model of --init-from, and this model."""
    folder, trust_code = options.init_from, options.trust_code
    assert folder is not None
    try:
        start = stored_config(folder, trust_code=trust_code)
    except RunFolderError:
        model = load_run(folder, trust_code=trust_code).model()
        return config.continuing(model), model
    taken = {name: getattr(start, name) for name in MODEL}
    return dataclasses.replace(config, **taken), trained_model(folder, start)


def _told(learning: Learning) -> None:
    say(
        f"step {learning.steps:,}: loss {learning.scores.curve[-1]:.4f}, fading {learning.scores.fading:.4f}",
        file=sys.stderr,
    )
