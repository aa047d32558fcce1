"""`linrec convert CHECKPOINT`: convert another library's checkpoint to a run folder, or a run back."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from linrec.cli.options import ConvertOptions
from linrec.cli.output import say
from linrec.cli.parsing import one_line_errors
from linrec.convert import ConversionError, to_hugging_face
from linrec.errors import ConfigError
from linrec.lab.train import load_run
from linrec.lab.train.fabric import program
from linrec.lab.train.start import open_start, tokenizer_for, write_converted
from linrec.models import LanguageModel


def run(options: ConvertOptions, words: Sequence[str]) -> int:
    """Run `linrec convert`."""
    command = shlex.join([*program(), *words])
    with one_line_errors():
        if options.like is not None:
            return _back(options, options.like)
        start = open_start(options.checkpoint, trust_code=options.trust_code)
        tokenizer = tokenizer_for(start, options.tokenizer)
        write_converted(start, options.out, tokenizer, length=options.length, command=command)
    return _done(start.model, options.out)


def _back(options: ConvertOptions, like: Path) -> int:
    """Write the model of a run in the layout of a checkpoint."""
    model = load_run(options.checkpoint, trust_code=options.trust_code).model()
    try:
        to_hugging_face(model, options.out, like=like)
    except ConversionError as error:
        raise ConfigError(str(error)) from error
    return _done(model, options.out)


def _done(model: LanguageModel, out: Path) -> int:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    say(f"{parameters:,} parameters; all in {out}")
    return 0
