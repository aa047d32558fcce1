"""`python -m perf iterations`: Newton's iterations on the layers of trained models."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.console import Console

from linrec.errors import RunFolderError
from linrec.lab.train import load_run
from linrec.lab.train.fabric import seed_all
from linrec.lab.train.run import Run
from linrec.models import SequenceClassifier, SequenceClassifierConfig
from linrec.ops.core.call import Call, Result, handling
from linrec.ops.nonlinear_scan import OPERATOR, Convergence, ConvergenceError
from perf.engine import Options, RefusedError, Report
from perf.nonlinear import MAX_ITERATIONS, NEWTON, NEWTON_STATE, QUASI, run_as
from perf.table import show_table


@dataclass(frozen=True, kw_only=True)
class IterationsOptions(Options):
    """Newton's iterations that a trained model needs, with its initial and its trained weights.

    Args:
        runs: run folders of sequence classifiers with mixers on nonlinear_scan.
        samples: number of validation samples.
        out: folder for DEVICE.json.
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    samples: int = 16
    out: Path = Path("results/iterations")


def iterations(options: IterationsOptions, command: str) -> int:
    """Count the iterations, write and print the results; return the exit status."""
    report = Report(options, command, samples=options.samples)

    def measure(folder: Path) -> dict[str, Any]:
        try:
            run = load_run(folder)
            counts = count_iterations(run, report.device, options.samples)
        except (RunFolderError, ValueError) as error:
            raise RefusedError(error) from error
        mixer = run.config.model.mixer
        return {"run": str(folder), "task": run.config.name, "mixer": mixer, "counts": counts}

    report.measure({str(folder): folder for folder in options.runs}, measure, key="runs")
    return report.finish(show)


def count_iterations(run: Run, device: torch.device, n: int) -> list[dict[str, Any]]:
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
        counts: list[dict[str, Any]] = []
        with torch.no_grad(), counting(counts):
            model.eval().to(device)(inputs, lengths=lengths, dt=dt)
        found += [{"weights": weights, **count} for count in counts]
    return found


@contextmanager
def counting(counts: list[dict[str, Any]]) -> Iterator[None]:
    """Add the iterations of every call of `nonlinear_scan` within the context to `counts`."""
    layers = 0

    def handler(call: Call, proceed: Callable[[], Result]) -> Result:
        nonlocal layers
        if call.operator is OPERATOR:
            for mode in (NEWTON, QUASI):
                counts.append({"layer": layers, "mode": mode, **_counted(call, mode)})
            layers += 1
        return proceed()

    with handling(handler):
        yield


def _counted(call: Call, mode: str) -> dict[str, Any]:
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


def show(console: Console, results: dict[str, Any]) -> None:
    """Print the iterations."""
    lines = []
    for run in results["runs"]:
        for count in run["counts"]:
            found = str(count["iterations"]) if "iterations" in count else count["missing"]
            place = [run["task"], str(run["mixer"]), count["weights"], str(count["layer"])]
            lines.append([*place, count["mode"], found])
    headings = ("task", "mixer", "weights", "layer", "mode", "iterations")
    show_table(console, "", headings, lines, left=5, wrap=headings)
