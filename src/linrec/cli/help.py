"""The help of the command line, written without PyTorch, whose import takes more than a second.

The names of recipes and suites come from listing.json, which `python docs/tables.py` generates from the code.
"""

import json
import textwrap
from collections.abc import Mapping
from importlib import resources
from typing import Any

from linrec.cli.options import OPTIONS_OF
from linrec.cli.parsing import parse

TRAIN = """\
usage: linrec train RECIPE [--section.option VALUE ...]
       linrec train --resume RUN

Train a model into a run folder, by default runs/RECIPE.

recipes:
{recipes}

examples:
  linrec train memory-horizon --loop.seed 1 --out runs/one
  linrec train memory-horizon \\
      --model.mixer-args.transition fixed
  linrec train memory-horizon \\
      --model.mixer gla gla attention \\
      --model.mixer-args.attention.window 128
  linrec train --resume runs/one
  torchrun --nproc-per-node 2 -m linrec train memory-horizon \\
      --loop.strategy fsdp

`linrec train RECIPE --help` shows the most common options,
`linrec train RECIPE --help-all` every option.
"""

BENCH = """
suites:
{suites}

`linrec bench queue JOBS` works off a queue of jobs in short allocations:
`linrec bench queue --help` shows its options.
"""

LEARN = """
streams:
{streams}

learners:
{learners}
"""


def of_command(command: str, words: list[str]) -> bool:
    """Print the help of a command if the words contain -h or --help; return whether the help was printed."""
    if not {"-h", "--help"} & {*words}:
        return False
    if command == "train" and words[0] in ("-h", "--help"):
        print(train_help(), end="")
        return True
    if command not in OPTIONS_OF:
        return False
    try:
        parse(OPTIONS_OF[command], ["--help"], f"linrec {command}")
    except SystemExit:
        if command == "bench":
            print(BENCH.format(suites=_lines(_listing("suites"))), end="")
        if command == "learn":
            listed = {kind: _lines(_listing(kind)) for kind in ("streams", "learners")}
            print(LEARN.format(**listed), end="")
    return True


def train_help() -> str:
    """Return the help of `linrec train` without a recipe."""
    return TRAIN.format(recipes=_lines(_listing("recipes")))


def _listing(kind: str) -> Mapping[str, str]:
    listing: Any = json.loads(resources.files("linrec.cli").joinpath("listing.json").read_text())
    return listing[kind]


def _lines(described: Mapping[str, str]) -> str:
    # narrow enough for half a screen
    indent = " " * 6
    return "\n".join(
        f"  {name}\n"
        + textwrap.fill(text, 60, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
        for name, text in described.items()
    )
