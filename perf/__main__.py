"""The command line: `python -m perf COMMAND`, from the root of the repository."""

import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import tyro

from perf.commands.cells import CellsOptions, cells
from perf.commands.decoding import DecodingOptions, decoding
from perf.commands.iterations import IterationsOptions, iterations
from perf.commands.loops import LoopsOptions, loops
from perf.commands.loss import LossOptions, loss
from perf.commands.matrix import MatrixOptions, matrix
from perf.commands.models import ModelsOptions, models
from perf.commands.nonlinear import NonlinearOptions, nonlinear
from perf.commands.ops import OpsOptions, ops
from perf.commands.results import RefusedError
from perf.commands.segments import SegmentsOptions, segments
from perf.commands.steps import StepsOptions, steps
from perf.commands.tasks import TasksOptions, tasks
from perf.commands.training import TrainingOptions, training

COMMANDS: dict[str, tuple[type[Any], Callable[[Any, str], int]]] = {
    "ops": (OpsOptions, ops),
    "matrix": (MatrixOptions, matrix),
    "steps": (StepsOptions, steps),
    "loops": (LoopsOptions, loops),
    "nonlinear": (NonlinearOptions, nonlinear),
    "cells": (CellsOptions, cells),
    "iterations": (IterationsOptions, iterations),
    "loss": (LossOptions, loss),
    "models": (ModelsOptions, models),
    "training": (TrainingOptions, training),
    "decoding": (DecodingOptions, decoding),
    "segments": (SegmentsOptions, segments),
    "tasks": (TasksOptions, tasks),
}
HELP = f"usage: python -m perf {{{','.join(COMMANDS)}}} ...\n\n`python -m perf COMMAND --help` says more."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, 1 where something was wrong or failed, 2 for a wrong command line."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] not in COMMANDS:
        print(HELP, file=sys.stderr)
        return 0 if words[:1] in (["-h"], ["--help"]) else 2
    options_type, run = COMMANDS[words[0]]
    try:
        options = tyro.cli(options_type, args=words[1:], prog=f"python -m perf {words[0]}")
    except SystemExit as stop:
        return 2 if stop.code else 0
    if options.device == "cuda" and not torch.cuda.is_available():
        return _refuse("there is no CUDA device here; pass --device cpu.")
    try:
        return run(options, shlex.join(["python", "-m", "perf", *words]))
    except RefusedError as error:
        return _refuse(error)


def _refuse(what: object) -> int:
    print(f"perf: {what}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
