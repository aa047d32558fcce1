"""The command line: `python -m perf COMMAND`, from the root of the repository."""

import shlex
import sys
from collections.abc import Sequence

import torch
import tyro

from perf.cells import Cells
from perf.command import Command, RefusedError
from perf.decoding import Decoding
from perf.learners import Learners
from perf.loops import Loops
from perf.loss import Loss
from perf.matrix import Matrix, Steps
from perf.models import Models
from perf.nonlinear import Iterations, Nonlinear
from perf.ops import Ops
from perf.parallel import Parallel
from perf.segments import Segments
from perf.serving import Serving
from perf.speculation import Speculation
from perf.tasks import Tasks
from perf.training import Training

KINDS: tuple[type[Command], ...] = (
    *(Ops, Matrix, Steps, Learners, Loops, Nonlinear, Cells, Iterations, Loss),
    *(Models, Training, Decoding, Serving, Speculation, Segments, Tasks, Parallel),
)
COMMANDS = {kind.__name__.lower(): kind for kind in KINDS}
HELP = f"usage: python -m perf {{{','.join(COMMANDS)}}} ...\n\n`python -m perf COMMAND --help` says more."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, 1 if a result is wrong or failed, 2 for a wrong command line."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] not in COMMANDS:
        print(HELP, file=sys.stderr)
        return 0 if words[:1] in (["-h"], ["--help"]) else 2
    try:
        command = tyro.cli(COMMANDS[words[0]], args=words[1:], prog=f"python -m perf {words[0]}")
    except SystemExit as stop:
        return 2 if stop.code else 0
    try:
        if command.device == "cuda" and not torch.cuda.is_available():
            raise RefusedError("there is no CUDA device here; pass --device cpu.")
        try:
            rows = command.chosen()
        except ValueError as error:
            raise RefusedError(error) from error
        return command.run(rows, shlex.join(["python", "-m", "perf", *words]))
    except RefusedError as error:
        print(f"perf: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
