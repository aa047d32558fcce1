"""A training step of one layer of a nonlinear cell, by the ways to its gradient."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from linrec.lab.tasks.dynamics import Adding
from linrec.lab.train import LoopConfig, get_recipe
from linrec.lab.train.fabric import deterministic, matmul_precision
from linrec.lab.train.step import EAGER_STEPS
from linrec.models import SequenceClassifier, SequenceClassifierConfig
from linrec.models.arguments import mixer_parameters
from linrec.models.regional import compiling
from linrec.ops.core.call import Call, Result, handling
from linrec.ops.nonlinear_scan import OPERATOR
from perf.memory import held_bytes, peak_bytes, release, why
from perf.nonlinear import run_as
from perf.timing import Rate, calls_per_second, time_once, wait
from perf.training import Windows, make_step

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
class CellRow:
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

    @property
    def name(self) -> str:
        """The row's name, such as "lem-adjoint-t1000" or "unicornn-reversible-eager-t1000"."""
        return f"{self.model}-{self.gradient}{'' if self.compiled else '-eager'}-t{self.time}"


def cell_rows_of(
    models: Sequence[str], lengths: Sequence[int], device_type: str, *, quick: bool = False
) -> list[CellRow]:
    """Return the rows of the models; without lengths, at those of the device.

    Programs of torch.compile store the states of reversible layers, so these layers are measured eager, with
    and without their states.
    """
    compiled = device_type == "cuda"
    # the fewest steps that are captured on CUDA
    lengths = lengths or ((80,) if quick else (1000, 4000, LONG) if compiled else (1000,))
    rows = []
    for model in models:
        ways = [(AUTOGRAD, compiled), (ADJOINT, compiled)]
        if "reversible" in mixer_parameters(model):
            ways += [(ADJOINT, False), (REVERSIBLE, False)]
        for length in lengths:
            # long sequences in a batch that fits
            batch, size = (2, 4) if quick else (8 if length >= LONG else 50, 128)
            rows += [CellRow(model, *way, length, batch, size) for way in dict.fromkeys(ways)]
    return rows


@contextmanager
def gradient_of_loops(gradient: str) -> Iterator[None]:
    """Run the calls of `nonlinear_scan` within the context as if their argument `gradient` were this one."""

    def handler(call: Call, proceed: Callable[[], Result]) -> Result:
        if call.operator is not OPERATOR:
            return proceed()
        return run_as(call, call.backend.mode, gradient=gradient)

    with handling(handler):
        yield


def measure_cell(row: CellRow, device: torch.device, windows: Windows) -> dict[str, Any]:
    """Measure the training step of a row on a batch of the adding task.

    Returns:
        What JSON holds of the row: "parameters", "first_seconds", "steps_per_second" with "median", "lowest",
        "highest" and the "calls" of a window, "us_per_step" of time, "peak_bytes", "held_bytes" of the
        parameters, the optimizer and the batch between two training steps, and "bytes_per_step", which is the
        rest of the peak over the steps of all sequences; or "missing", the reason why there are none.
    """
    result = {"name": row.name, **dataclasses.asdict(row)}
    if row.gradient == AUTOGRAD and row.time > AUTOGRAD_STEPS:
        return result | {"missing": TOO_LONG}
    release(device)
    try:
        return result | _measured(row, device, windows)
    except Exception as error:
        return result | {"missing": why(error)}


def loop_of(row: CellRow, device: torch.device) -> LoopConfig:
    """Return the recipe's training loop with the row's batch and compilation."""
    return dataclasses.replace(
        RECIPE.loop,
        batch_size=row.batch,
        compile="on" if row.compiled else "off",
        device="cuda" if device.type == "cuda" else "cpu",
    )


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


def _measured(row: CellRow, device: torch.device, windows: Windows) -> dict[str, Any]:
    loop = loop_of(row, device)
    # the reversible layer calls no operator
    loops = gradient_of_loops(ADJOINT if row.gradient == REVERSIBLE else row.gradient)
    with deterministic(loop.deterministic), matmul_precision(loop.matmul_precision), compiling(), loops:
        model, step = make_step(partial(SequenceClassifier, model_of(row)), RECIPE.optim, loop)
        drawn = Adding(length=row.time).draw(np.random.default_rng(0), row.batch)
        inputs, targets = (torch.from_numpy(part).to(device) for part in (drawn.inputs, drawn.targets))
        call = partial(step, inputs, targets)
        start = time.perf_counter()
        call()
        wait(device)
        first = time.perf_counter() - start
        model.zero_grad()
        # the peak of the computation, not of its compilation
        release(device)
        held = held_bytes(device)
        for _ in range(EAGER_STEPS if row.compiled else 0):
            call()
        rate = _rate(call, device, windows)
    peak = peak_bytes(device)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "first_seconds": first,
        "steps_per_second": dataclasses.asdict(rate),
        "us_per_step": 1e6 / rate.median / row.time,
        "peak_bytes": peak,
        "held_bytes": held,
        "bytes_per_step": None if peak is None or held is None else (peak - held) / (row.batch * row.time),
    }


def _rate(call: Callable[[], Any], device: torch.device, windows: Windows) -> Rate:
    milliseconds = time_once(call, device)
    if milliseconds > LONG_MS:
        return Rate(*3 * (1e3 / milliseconds,), 1)
    return calls_per_second(call, device, windows=windows.windows, seconds=windows.seconds)
