"""`linrec report RUN...`: pictures and tables of trained models."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from linrec.cli.parsing import parse
from linrec.report import write_report
from linrec.train import ConfigError, load_run


@dataclass(frozen=True)
class Options:
    """Write report.html with its pictures, from run folders alone.

    Args:
        runs: run folders.
        out: folder for the report; by default that of the one run, or the one that all runs lie in.
    """

    runs: Annotated[
        tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...", help_behavior_hint="")
    ]
    out: Path | None = None


def run(words: list[str]) -> int:
    """Run `linrec report`."""
    options = parse(Options, words, "linrec report")
    if not options.runs:
        raise ConfigError("name at least one run folder: linrec report RUN ...")
    for run in options.runs:
        load_run(run)
    together = Path(os.path.commonpath([run.absolute().parent for run in options.runs]))
    out = options.out or (options.runs[0] if len(options.runs) == 1 else together)
    print(f"wrote {write_report(options.runs, out)}")
    return 0
