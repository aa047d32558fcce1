"""`linrec demo`: train two small models side by side, and report."""

from dataclasses import dataclass
from pathlib import Path

from linrec.cli.parsing import parse
from linrec.demo import run_demo


@dataclass(frozen=True)
class Options:
    """Train two small GateLoops side by side and write a report.

    Args:
        out: folder for both runs and the report; runs of an earlier demo in it are replaced.
    """

    out: Path = Path("runs/demo")


def run(words: list[str]) -> int:
    """Run `linrec demo`."""
    run_demo(parse(Options, words, "linrec demo").out)
    return 0
