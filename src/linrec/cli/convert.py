"""`linrec convert CHECKPOINT`: convert another library's checkpoint to a run folder."""

import shlex

from linrec.cli.options import ConvertOptions
from linrec.cli.output import say
from linrec.cli.parsing import one_line_errors, parse
from linrec.train.processes import program
from linrec.train.start import open_start, tokenizer_for, write_converted


def run(words: list[str]) -> int:
    """Run `linrec convert`."""
    options = parse(ConvertOptions, words, "linrec convert")
    command = shlex.join([*program(), "convert", *words])
    with one_line_errors():
        start = open_start(options.checkpoint)
        tokenizer = tokenizer_for(start, options.tokenizer)
        write_converted(start, options.out, tokenizer, length=options.length, command=command)
    parameters = sum(parameter.numel() for parameter in start.model.parameters())
    say(f"{parameters:,} parameters; all in {options.out}")
    return 0
