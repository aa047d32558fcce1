"""Newton's iterations on the layers of trained models, before and after training."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from linrec.lab.train.fabric import seed_all
from linrec.lab.train.run import Run
from linrec.models import SequenceClassifier, SequenceClassifierConfig
from linrec.ops.core.call import Call, Result, handling
from linrec.ops.nonlinear_scan import OPERATOR, Convergence, ConvergenceError
from perf.nonlinear import MAX_ITERATIONS, NEWTON, NEWTON_STATE, QUASI, run_as

START, END = "start", "end"


def count_iterations(run: Run, device: torch.device, n: int) -> list[dict[str, Any]]:
    """Count the iterations that validation samples need, with the run's initial and its trained weights.

    Args:
        run: the run of a sequence classifier with mixers on `nonlinear_scan`.
        device: where to count.
        n: number of samples.

    Returns:
        For each of "start" and "end" of training, each call of the operator in the order of the layers, and
        each mode of Newton's method: "weights", "layer", "mode", "steps", "state" and "iterations"; or
        "missing", the reason why there are none.
    """
    config = run.config.model
    if not isinstance(config, SequenceClassifierConfig):
        raise ValueError(f"{run.path} must be the run of a sequence classifier; got a language model.")
    batch = run.config.task.prepared().split("validation").rows(torch.arange(n))
    inputs = batch.inputs.to(device)
    lengths, dt = (None if part is None else part.to(device) for part in (batch.lengths, batch.dt))
    seed_all(run.config.loop.seed)
    found = []
    for weights, model in (START, SequenceClassifier(config)), (END, run.classifier()):
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
    # mixers give no diagonal, which "quasi_newton" needs for larger states
    if size > NEWTON_STATE:
        return sizes | {"missing": f"state over {NEWTON_STATE}"}
    report = Convergence().to(x.device)
    limited = {"max_iterations": MAX_ITERATIONS, "convergence": report, "otherwise": "error"}
    try:
        run_as(call, mode, gradient="auto", **limited)
    except ConvergenceError:
        return sizes | {"missing": f"no convergence in {MAX_ITERATIONS}"}
    return sizes | {"iterations": int(report.iterations)}
