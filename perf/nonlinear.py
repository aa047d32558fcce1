"""`python -m perf nonlinear` and `iterations`: nonlinear recurrences, step by step and by Newton's method."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor, nn

from linrec.errors import RunFolderError
from linrec.lab.train import load_run
from linrec.lab.train.fabric import seed_all
from linrec.lab.train.run import Run
from linrec.models import SequenceClassifier, SequenceClassifierConfig
from linrec.ops.core.backends import choose
from linrec.ops.core.call import Call, Result, handling
from linrec.ops.nonlinear_scan import OPERATOR, Convergence, ConvergenceError, nonlinear_scan
from perf import engine
from perf.command import Command, Named, RefusedError, RowCommand
from perf.engine import Calls, Record, Tensors
from perf.loops import layer_calls
from perf.operations import normal
from perf.table import Part, Table, errors, implementations_of
from perf.timing import Bench, Budget, Timing, UnsuitedError

CHECKED_STEPS = 256
CHECKED = f"h and the gradients of x and the weights, {CHECKED_STEPS} steps, against the loop in float64"
LOOP, NEWTON, QUASI, DAMPED = "loop", "newton", "quasi_newton", "damped"
METHODS: dict[str, dict[str, Any]] = {
    LOOP: {"mode": "recurrent", "gradient": "autograd"},
    "adjoint": {"mode": "recurrent", "gradient": "adjoint"},
    NEWTON: {"mode": NEWTON},
    QUASI: {"mode": QUASI},
    DAMPED: {"mode": DAMPED},
}
LAYERS: dict[str, Callable[..., nn.RNNBase]] = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
# the rules by which a row leaves out a method
LOOP_STEPS, NEWTON_STATE = 1000, 64
# factors of the recurrent weights, at which iterations are counted
GAINS = (1, 3)
MAX_ITERATIONS = 50
# a call that takes longer is timed once
LONG_MS = 1000.0


@dataclass(frozen=True)
class NonlinearRow(Named):
    cell: str
    size: int
    time: int
    batch: int

    # such as "lem-n64-t1000"
    template = "{row.cell}-n{row.size}-t{row.time}"

    @property
    def state(self) -> int:
        """The size of the state; LEM's has two numbers for each channel."""
        return 2 * self.size if self.cell == "lem" else self.size


@dataclass(frozen=True)
class Nonlinear(RowCommand):
    """Speed of nonlinear_scan's loops and of Newton's method beside torch's recurrent layers."""

    # most calls take longer than any budget
    budget = Budget(10, 40)

    def all_rows(self) -> list[NonlinearRow]:
        if self.quick:
            return [NonlinearRow(cell, 4, 20, 2) for cell in CELLS]
        lengths = {1000: 16, 10_000: 16, 100_000: 1} if self.device == "cuda" else {1000: 16}
        sizes = [(size, *length) for size in (16, 64, 512) for length in lengths.items()]
        return [NonlinearRow(cell, *size) for cell in CELLS for size in sizes]

    def measure(self, bench: Bench, row: NonlinearRow) -> Record:
        inputs, dh = make(row, bench.device)
        expected = outcome(row, tuple(x.double() for x in inputs), dh.double(), backend="reference")

        def method(name: str) -> Calls:
            if reason := left_out(row, name):
                raise UnsuitedError(reason)

            def check() -> None:
                found = outcome(row, inputs, dh, **METHODS[name])
                engine.assert_all_agree(("h", "dx", "dstate", "dW", "dW_y"), found, expected, torch.float32)

            function = partial(run, cell=row.cell, **METHODS[name])
            return engine.calls_of(function, inputs, dh, check=check)

        def layer(name: str) -> Calls:
            made = LAYERS[name](row.size, row.size, batch_first=True, device=bench.device)
            return layer_calls(made, dh[..., : row.size].contiguous())

        def entry_of(bench: Bench, calls: Calls, one: str) -> Record:
            call = calls.passes[one]
            bench.release()
            # the first call may compile
            converging(partial(bench.time_once, call))
            once = bench.time_once(call)
            # the loops wait for Python, so the wall clock measures them
            timing = Timing(*3 * (once,)) if once > LONG_MS else bench.measure(call, wall_clock=True)
            return {"ms": timing._asdict(), "us_per_step": timing.median * 1e3 / row.time}

        implementations = {name: partial(method, name) for name in METHODS}
        implementations |= {name: partial(layer, name) for name in LAYERS}
        found = engine.measure_each(bench, implementations, LOOP, entry_of)
        if "error" not in found:
            found["iterations"] = {
                name: {f"x{gain}": count_iterations(row, inputs, name, gain) for gain in GAINS}
                for name in (NEWTON, QUASI, DAMPED)
            }
        bench.release()
        return {**row.head(), "checked": CHECKED, **found}

    @staticmethod
    def show(results: Record) -> Iterator[Part]:
        yield Table(
            "milliseconds of a call, microseconds of a step; times as fast as the loop",
            "row {name} | pass {pass} | {implementation} | ms {ms[median]:.3f} | "
            "us/step {us_per_step:.1f} | x {ratio:.1f}",
            implementations_of(results["rows"]),
            left=3,
            wrap=("ms",),
            absent="-",
        )
        yield Table(
            "iterations of Newton's modes, by the gain of the recurrent weights",
            "row {name} | mode {mode} | gain {gain} | iterations {iterations} | residual {residual:.2g}",
            [
                {**entry, "name": row["name"], "mode": mode, "gain": gain}
                for row in results["rows"]
                for mode, gains in row.get("iterations", {}).items()
                for gain, entry in gains.items()
            ],
            left=3,
            wrap=("iterations",),
        )
        yield from errors(results["rows"])


def left_out(row: NonlinearRow, method: str) -> str | None:
    """Return the rule by which a row leaves out a method, or None."""
    if method == LOOP and row.time > LOOP_STEPS:
        return f"over {LOOP_STEPS:,} steps"
    if method == NEWTON and row.state > NEWTON_STATE:
        return f"state over {NEWTON_STATE}"
    return None


def converging(call: Callable[[], Any]) -> Any:
    """Return the result of a call, or raise UnsuitedError where Newton's method does not converge."""
    try:
        return call()
    except ConvergenceError as error:
        raise UnsuitedError("no convergence") from error


def count_iterations(row: NonlinearRow, inputs: Tensors, method: str, gain: int) -> Record:
    """Return the iterations and the last residual of a call with `gain` times the recurrent weights."""
    x, state, *weights = inputs
    report = Convergence().to(x.device)
    options = {**METHODS[method], "convergence": report, "max_iterations": MAX_ITERATIONS}

    @torch.no_grad()
    def counted() -> Record:
        converging(lambda: run(x, state, *(gain * W for W in weights), cell=row.cell, **options))
        return {"iterations": int(report.iterations), "residual": float(report.residual)}

    reason = left_out(row, method)
    return {"missing": reason} if reason else engine.attempt(counted)


def elman(h: Tensor, x: Tensor, W: Tensor) -> Tensor:
    """Return tanh(W h + x)."""
    return torch.tanh(x + h @ W.mT)


def elman_diagonal(h: Tensor, x: Tensor, W: Tensor) -> Tensor:
    """Return the diagonal of the Jacobian of `elman`."""
    return (1 - elman(h, x, W) ** 2) * W.diagonal()


def lem(zy: Tensor, Vx: Tensor, W: Tensor, W_y: Tensor) -> Tensor:
    """Return z and y of a long expressive memory with a step size of 1; see `linrec.mixers.lem`."""
    z, y = zy.chunk(2, -1)
    n = y.shape[-1]
    of_steps, Vx_y, Vx_z = Vx.split([2 * n, n, n], -1)
    Wy, Wy_z = (y @ W.mT).split([2 * n, n], -1)
    step_y, step_z = torch.sigmoid(of_steps + Wy).chunk(2, -1)
    z = (1 - step_z) * z + step_z * torch.tanh(Wy_z + Vx_z)
    y = (1 - step_y) * y + step_y * torch.tanh(z @ W_y.mT + Vx_y)
    return torch.cat([z, y], -1)


def lem_diagonal(zy: Tensor, Vx: Tensor, W: Tensor, W_y: Tensor) -> Tensor:
    """Return the diagonal of the Jacobian of `lem` without the paths through products."""
    n = zy.shape[-1] // 2
    steps = torch.sigmoid(Vx[..., : 2 * n] + zy[..., n:] @ W[: 2 * n].mT)
    step_y, step_z = steps.chunk(2, -1)
    return torch.cat([1 - step_z, 1 - step_y], -1)


CELLS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "tanh": (elman, elman_diagonal),
    "lem": (lem, lem_diagonal),
}


def make(row: NonlinearRow, device: torch.device) -> tuple[Tensors, Tensor]:
    """Return x, a state of zeros and the weights, uniform as torch's, and the gradient of h."""
    random = torch.Generator(device).manual_seed(1)
    n, bound = row.size, row.size**-0.5
    x = normal((row.batch, row.time, n if row.cell == "tanh" else 4 * n), torch.float32, random)
    rows = (n,) if row.cell == "tanh" else (3 * n, n)
    weights = (torch.empty(m, n, device=device).uniform_(-bound, bound, generator=random) for m in rows)
    dh = normal((row.batch, row.time, row.state), torch.float32, random)
    return (x, x.new_zeros(row.batch, row.state), *weights), dh


def run(x: Tensor, state: Tensor, *weights: Tensor, cell: str, **options: Any) -> Tensor:
    function, diagonal = CELLS[cell]
    return nonlinear_scan(function, x, weights, state=state, diagonal=diagonal, **options)[0]


def outcome(row: NonlinearRow, inputs: Tensors, dh: Tensor, **options: Any) -> Tensors:
    first = (inputs[0][:, :CHECKED_STEPS], *inputs[1:])
    return engine.outputs_and_gradients(partial(run, cell=row.cell, **options), first, dh[:, :CHECKED_STEPS])


def run_as(call: Call, mode: str, **changes: Any) -> Result:
    """Run a call of `nonlinear_scan`, seen by a handler, in a mode, with other arguments or options."""
    of_inputs = {name: value for name, value in changes.items() if name in call.inputs._fields}
    options = {name: value for name, value in changes.items() if name not in of_inputs}
    inputs = call.inputs._replace(**of_inputs, newton=call.inputs.newton.but(**options))
    device, name = inputs.x.device.type, call.backend.name
    return OPERATOR.run(inputs, choose(OPERATOR.name, OPERATOR.backends, inputs, device, mode, name))


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

    def chosen(self) -> Mapping[str, Run]:
        runs = {}
        for folder in self.runs:
            try:
                runs[str(folder)] = run = load_run(folder)
            except RunFolderError as error:
                raise RefusedError(error) from error
            if not isinstance(run.config.model, SequenceClassifierConfig):
                raise RefusedError(f"{folder} must be the run of a sequence classifier.")
        return runs

    def about(self, bench: Bench) -> tuple[Bench, Record]:
        return bench, {"samples": self.samples}

    def measure(self, bench: Bench, row: Run) -> Record:
        names = {"run": str(row.path), "task": row.config.name, "mixer": row.config.model.mixer}
        return {**names, "counts": iterations_of(row, bench.device, self.samples)}

    @staticmethod
    def show(results: Record) -> Iterator[Part]:
        names = ("task", "mixer", "weights", "layer", "mode", "iterations")
        counts = [{**run, **count} for run in results["runs"] for count in run["counts"]]
        yield Table("", " | ".join(f"{name} {{{name}}}" for name in names), counts, left=5, wrap=names)


def iterations_of(run: Run, device: torch.device, n: int) -> list[Record]:
    """Return iterations of n validation samples with initial and trained weights, by layer and mode."""
    config = run.config.model
    assert isinstance(config, SequenceClassifierConfig)
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
