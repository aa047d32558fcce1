"""`python -m perf cells`: training steps of one layer of a nonlinear cell, by the ways to its gradient."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from linrec import mixers
from linrec.lab.tasks.dynamics import Adding
from linrec.lab.train import get_recipe
from linrec.models import SequenceClassifier, SequenceClassifierConfig
from linrec.models.compilation import EAGER_STEPS
from linrec.models.config import mixer_parameters
from linrec.ops.core.call import Call, Result, handling
from linrec.ops.nonlinear_scan import OPERATOR, UNROLLED
from perf.command import Command, Named, RefusedError, by_name
from perf.engine import Record, attempt
from perf.nonlinear import run_as
from perf.table import Part, Table, errors
from perf.timing import OUT_OF_MEMORY, Bench, Windows
from perf.training import as_training, make_step, number_of_parameters

AUTOGRAD, ADJOINT, REVERSIBLE = "autograd", "adjoint", "reversible"
# the rule by which a row is left out
AUTOGRAD_STEPS = 1000
TOO_LONG = f"over {AUTOGRAD_STEPS:,} steps"
# the length of EigenWorms
LONG = 17_984
RECIPE = get_recipe("adding")
# a training step that takes longer is timed once
LONG_MS = 1000.0


@dataclass(frozen=True)
class CellRow(Named):
    """A layer, the way to its gradient, and its sizes.

    Args:
        model: name of a mixer on `nonlinear_scan`.
        gradient: "autograd" or "adjoint", as in `nonlinear_scan`; or "reversible", the mixer's argument.
        compiled: whether the training step is compiled, and on CUDA captured, as `linrec train` does there.
        time: steps of a sequence.
        batch: sequences of a training step.
        size: channels.
    """

    model: str
    gradient: str
    compiled: bool
    time: int
    batch: int
    size: int

    # such as "lem-adjoint-t1000"
    template = "{row.model}-{row.gradient}{row.eager}-t{row.time}"

    @property
    def eager(self) -> str:
        return "" if self.compiled else "-eager"


@dataclass(frozen=True)
class Cells(Command):
    """Training steps of one layer of a nonlinear cell, as `linrec train adding` makes them, by its gradient.

    Args:
        models: names of mixers on `nonlinear_scan`.
        lengths: steps of a sequence; by default 1,000, and on CUDA also 4,000 and 17,984.
    """

    models: tuple[str, ...] = ("lem", "cornn", "unicornn")
    lengths: tuple[int, ...] = ()

    windows = Windows(3, 0.5)
    expected = (OUT_OF_MEMORY, TOO_LONG)

    def chosen(self) -> Mapping[str, CellRow]:
        """Return the rows by name.

        Programs of torch.compile store the states of reversible layers, so these layers are measured eager,
        with and without stored states.
        """
        for name in self.models:
            if mixers.get(name).recurrence != OPERATOR.name:
                on = f"`{OPERATOR.name}`"
                raise RefusedError(
                    f"--models takes mixers on {on}, such as lem; got {name!r}, a mixer without it."
                )
        if any(length <= UNROLLED for length in self.lengths):
            raise RefusedError(
                f"--lengths must be above {UNROLLED}, up to which torch.compile unrolls loops; "
                f"got {min(self.lengths)}."
            )
        compiled = self.device == "cuda"
        # 80 are the fewest steps that are captured on CUDA
        lengths = self.lengths or ((80,) if self.quick else (1000, 4000, LONG) if compiled else (1000,))
        rows = []
        for model in self.models:
            ways = [(AUTOGRAD, compiled), (ADJOINT, compiled)]
            if "reversible" in mixer_parameters(model):
                ways += [(ADJOINT, False), (REVERSIBLE, False)]
            for length in lengths:
                # long sequences in a batch that fits
                sizes = (2, 4) if self.quick else (8 if length >= LONG else 50, 128)
                rows += [CellRow(model, *way, length, *sizes) for way in dict.fromkeys(ways)]
        return by_name(rows)

    def about(self, bench: Bench) -> tuple[Bench, Record]:
        protocol = {
            "recipe": RECIPE.name,
            "precision": RECIPE.loop.precision,
            "matmul_precision": RECIPE.loop.matmul_precision,
            "windows": bench.windows._asdict(),
        }
        return bench, {"protocol": protocol}

    def measure(self, bench: Bench, row: CellRow) -> Record:
        if row.gradient == AUTOGRAD and row.time > AUTOGRAD_STEPS:
            return {**row.head(), "missing": TOO_LONG}
        bench.release()
        return {**row.head(), **attempt(lambda: measured(bench, row))}

    @staticmethod
    def show(results: Record) -> Iterator[Part]:
        yield Table(
            "training steps per second; time and memory of a step of a sequence",
            "row {name} | steps/s {steps_per_second[median]:.3g} | us/step {us_per_step:.1f} | "
            "GiB {peak_bytes:.2f GiB} | KiB/step {bytes_per_step:.2f KiB} | "
            "first s {first_seconds:.1f}",
            [row for row in results["rows"] if "missing" not in row],
        )
        yield from errors(results["rows"], key="missing")


def measured(bench: Bench, row: CellRow) -> Record:
    """Return the speed and the memory of the training step of a row, on a batch of the adding task."""
    loop = dataclasses.replace(
        RECIPE.loop,
        batch_size=row.batch,
        compile="on" if row.compiled else "off",
        device="cuda" if bench.on_cuda else "cpu",
    )
    # the reversible layer calls no operator
    loops = gradient_of_loops(ADJOINT if row.gradient == REVERSIBLE else row.gradient)
    with as_training(loop), loops:
        model, step = make_step(partial(SequenceClassifier, model_of(row)), RECIPE.optim, loop)
        drawn = Adding(length=row.time).draw(np.random.default_rng(0), row.batch)
        inputs, targets = (torch.from_numpy(part).to(bench.device) for part in (drawn.inputs, drawn.targets))
        found = bench.steps(
            partial(step, inputs, targets),
            warm=EAGER_STEPS if row.compiled else 0,
            settle=model.zero_grad,
            longest_ms=LONG_MS,
        )
    peak, held = found.peak_bytes, found.held_bytes
    return {
        "parameters": number_of_parameters(model),
        "first_seconds": found.first_seconds,
        "steps_per_second": found.rate._asdict(),
        "us_per_step": 1e6 / found.rate.median / row.time,
        "peak_bytes": peak,
        "held_bytes": held,
        "bytes_per_step": None if peak is None or held is None else (peak - held) / (row.batch * row.time),
    }


def model_of(row: CellRow) -> SequenceClassifierConfig:
    """Return the recipe's model with the row's mixer in one layer, without channel mixing."""
    assert isinstance(RECIPE.model, SequenceClassifierConfig)
    return dataclasses.replace(
        RECIPE.model,
        mixer=row.model,
        mixer_args={"reversible": True} if row.gradient == REVERSIBLE else {},
        n_layers=1,
        d_model=row.size,
        channel_mixing="none",
    )


@contextmanager
def gradient_of_loops(gradient: str) -> Iterator[None]:
    """Run the calls of `nonlinear_scan` within the context with this argument `gradient`."""

    def handler(call: Call, proceed: Callable[[], Result]) -> Result:
        if call.operator is not OPERATOR:
            return proceed()
        return run_as(call, call.backend.mode, gradient=gradient)

    with handling(handler):
        yield
