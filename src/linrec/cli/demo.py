"""`linrec demo`: train two small models side by side, and write a report."""

from linrec.cli.options import DemoOptions
from linrec.cli.parsing import parse
from linrec.demo import run_demo


def run(words: list[str]) -> int:
    """Run `linrec demo`."""
    run_demo(parse(DemoOptions, words, "linrec demo").out)
    return 0
