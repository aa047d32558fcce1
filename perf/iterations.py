"""`python -m perf iterations`: Newton's iterations on the layers of trained models."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro

from linrec.errors import RunFolderError
from linrec.lab.train import load_run
from linrec.lab.train.fabric import seed_all
from linrec.lab.train.run import Run
from linrec.models import SequenceClassifier, SequenceClassifierConfig
from linrec.ops.core.call import Call, Result, handling
from linrec.ops.nonlinear_scan import OPERATOR, Convergence, ConvergenceError
from perf.command import Command, RefusedError
from perf.engine import Record
from perf.nonlinear import MAX_ITERATIONS, NEWTON, NEWTON_STATE, QUASI, run_as
from perf.table import Part, Table
from perf.timing import Bench


@dataclass(frozen=True, kw_only=True)
class Iterations(Command):
    """Newton's iterations that a trained model needs, with its initial and its trained weights.

    Args:
        runs: run folders of sequence classifiers with mixers on nonlinear_scan.
        samples: number of validation samples.
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    samples: int = 16

    key = "runs"

    def chosen(self) -> Mapping[str, Path]:
        return {str(folder): folder for folder in self.runs}

    def about(self, bench: Bench) -> tuple[Bench, Record]:
        return bench, {"samples": self.samples}

    def measure(self, bench: Bench, row: Path) -> Record:
        try:
            run = load_run(row)
            counts = count_iterations(run, bench.device, self.samples)
        except (RunFolderError, ValueError) as error:
            raise RefusedError(error) from error
        mixer = run.config.model.mixer
        return {"run": str(row), "task": run.config.name, "mixer": mixer, "counts": counts}

    @staticmethod
    def show(results: Record) -> Iterator[Part]:
        names = ("task", "mixer", "weights", "layer", "mode", "iterations")
        counts = [{**run, **count} for run in results["runs"] for count in run["counts"]]
        yield Table("", " | ".join(f"{name} {{{name}}}" for name in names), counts, left=5, wrap=names)


def count_iterations(run: Run, device: torch.device, n: int) -> list[Record]:
    """Return iterations of n validation samples with initial and trained weights, by layer and mode."""
    config = run.config.model
    if not isinstance(config, SequenceClassifierConfig):
        raise ValueError(f"{run.path} must be the run of a sequence classifier; got a language model.")
    batch = run.config.task.prepared().split("validation").rows(torch.arange(n))
    inputs = batch.inputs.to(device)
    lengths, dt = (None if part is None else part.to(device) for part in (batch.lengths, batch.dt))
    seed_all(run.config.loop.seed)
    found = []
    for weights, model in ("start", SequenceClassifier(config)), ("end", run.classifier()):
        counts: list[Record] = []
        with torch.no_grad(), counting(counts):
            model.eval().to(device)(inputs, lengths=lengths, dt=dt)
        found += [{"weights": weights, **count} for count in counts]
    return found


@contextmanager
def counting(counts: list[Record]) -> Iterator[None]:
    """Add the iterations of every call of `nonlinear_scan` within the context to `counts`."""
    layers = 0

    def handler(call: Call, proceed: Callable[[], Result]) -> Result:
        nonlocal layers
        if call.operator is OPERATOR:
            for mode in (NEWTON, QUASI):
                counts.append({"layer": layers, "mode": mode, **counted(call, mode)})
            layers += 1
        return proceed()

    with handling(handler):
        yield


def counted(call: Call, mode: str) -> Record:
    """Return the iterations of a call in a mode, or "missing"."""
    x, state = call.inputs.x, call.inputs.state
    size = (x if state is None else state).shape[-1]
    sizes = {"steps": x.shape[1], "state": size}
    # "quasi_newton" needs a diagonal for larger states, which mixers do not give
    if size > NEWTON_STATE:
        return sizes | {"missing": f"state over {NEWTON_STATE}"}
    report = Convergence().to(x.device)
    limited = {"max_iterations": MAX_ITERATIONS, "convergence": report, "otherwise": "error"}
    try:
        run_as(call, mode, gradient="auto", **limited)
    except ConvergenceError:
        return sizes | {"missing": f"no convergence in {MAX_ITERATIONS}"}
    return sizes | {"iterations": int(report.iterations)}
