"""`python -m perf nonlinear`: nonlinear recurrences, step by step and by Newton's method."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from linrec.ops.core.backends import choose
from linrec.ops.core.call import Call, Result
from linrec.ops.nonlinear_scan import OPERATOR, Convergence, ConvergenceError, nonlinear_scan
from perf import engine
from perf.engine import PASSES, Calls, Entry, Report, RowOptions, Tensors
from perf.loops import layer_calls
from perf.operations import normal
from perf.table import implementations_of, show_errors, show_table
from perf.timing import Bench, Budget, Timing, UnsuitedError

CHECKED_STEPS = 256
CHECKED = f"h and the gradients of x and the weights, {CHECKED_STEPS} steps, against the loop in float64"
LOOP, ADJOINT, NEWTON, QUASI, DAMPED = "loop", "adjoint", "newton", "quasi_newton", "damped"
METHODS: dict[str, dict[str, Any]] = {
    LOOP: {"mode": "recurrent", "gradient": "autograd"},
    ADJOINT: {"mode": "recurrent", "gradient": "adjoint"},
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
class NonlinearOptions(RowOptions):
    """Speed of nonlinear_scan's loops and of Newton's method beside torch's recurrent layers.

    Args:
        out: folder for DEVICE.json.
    """

    out: Path = Path("results/nonlinear")


def nonlinear(options: NonlinearOptions, command: str) -> int:
    """Measure the rows, write and print the results; return the exit status."""
    rows = engine.selected(
        options.rows, engine.by_name(nonlinear_rows_of(options.device, quick=options.quick))
    )
    # most calls take longer than any budget
    report, bench = Report(options, command), engine.bench_of(options, budget=Budget(10, 40))
    report.measure(rows, lambda row: measure_nonlinear(bench, row))
    return report.finish(show)


@dataclass(frozen=True)
class NonlinearRow:
    """A cell and its sizes."""

    cell: str
    size: int
    time: int
    batch: int

    @property
    def name(self) -> str:
        """The name, such as "lem-n64-t1000"."""
        return f"{self.cell}-n{self.size}-t{self.time}"

    @property
    def state(self) -> int:
        """The size of the state; LEM's has two numbers for each channel."""
        return 2 * self.size if self.cell == "lem" else self.size


def nonlinear_rows_of(device_type: str, *, quick: bool = False) -> list[NonlinearRow]:
    """Return the rows of a device; `quick` keeps the cells, at a meaningless size."""
    if quick:
        return [NonlinearRow(cell, 4, 20, 2) for cell in CELLS]
    lengths = {1000: 16, 10_000: 16, 100_000: 1} if device_type == "cuda" else {1000: 16}
    return [
        NonlinearRow(cell, size, time, batch)
        for cell in CELLS
        for size in (16, 64, 512)
        for time, batch in lengths.items()
    ]


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
    """Return h of every step."""
    function, diagonal = CELLS[cell]
    return nonlinear_scan(function, x, weights, state=state, diagonal=diagonal, **options)[0]


def outcome(row: NonlinearRow, inputs: Tensors, dh: Tensor, **options: Any) -> Tensors:
    """Return h and all gradients of the first steps."""
    first = (inputs[0][:, :CHECKED_STEPS], *inputs[1:])
    return engine.outputs_and_gradients(partial(run, cell=row.cell, **options), first, dh[:, :CHECKED_STEPS])


def measure_nonlinear(bench: Bench, row: NonlinearRow) -> dict[str, Any]:
    """Check and time the methods, time torch's layers, and count the iterations of Newton's modes."""
    result: dict[str, Any] = {"name": row.name, **dataclasses.asdict(row), "checked": CHECKED}
    inputs, dh = make(row, bench.device)
    expected = outcome(row, tuple(x.double() for x in inputs), dh.double(), backend="reference")
    entries: dict[str, dict[str, Entry]] = {}

    def check(method: str) -> None:
        found = outcome(row, inputs, dh, **METHODS[method])
        engine.assert_all_agree(("h", "dx", "dstate", "dW", "dW_y"), found, expected, torch.float32)

    for method, options in METHODS.items():
        if reason := left_out(row, method):
            entries[method] = {one: {"missing": reason} for one in PASSES}
            continue
        if wrong := engine.failure(partial(check, method)):
            return result | {"error": f"{method}: {wrong}"}
        calls = engine.calls_of(partial(run, cell=row.cell, **options), inputs, dh)
        entries[method] = _timed(bench, calls, row)
    for name, layer in LAYERS.items():
        made = layer(row.size, row.size, batch_first=True, device=bench.device)
        entries[name] = _timed(bench, layer_calls(made, dh[..., : row.size].contiguous()), row)
    iterations = {
        method: {f"x{gain}": count_iterations(row, inputs, method, gain) for gain in GAINS}
        for method in (NEWTON, QUASI, DAMPED)
    }
    bench.release()
    return result | {"passes": engine.by_pass(entries, LOOP), "iterations": iterations}


def run_as(call: Call, mode: str, **changes: Any) -> Result:
    """Run a call of `nonlinear_scan`, seen by a handler, in a mode, with other arguments or options."""
    of_inputs = {name: value for name, value in changes.items() if name in call.inputs._fields}
    options = {name: value for name, value in changes.items() if name not in of_inputs}
    inputs = call.inputs._replace(**of_inputs, newton=call.inputs.newton.but(**options))
    device, name = inputs.x.device.type, call.backend.name
    return OPERATOR.run(inputs, choose(OPERATOR.name, OPERATOR.backends, inputs, device, mode, name))


def left_out(row: NonlinearRow, method: str) -> str | None:
    """Return the rule by which a row leaves out a method, or None."""
    if method == LOOP and row.time > LOOP_STEPS:
        return f"over {LOOP_STEPS:,} steps"
    if method == NEWTON and row.state > NEWTON_STATE:
        return f"state over {NEWTON_STATE}"
    return None


def converged(measurement: Callable[[], Entry]) -> Entry:
    """Return an entry, with "missing" where Newton's method does not converge or the measurement fails."""

    def told() -> Entry:
        try:
            return measurement()
        except ConvergenceError as error:
            raise UnsuitedError("no convergence") from error

    return engine.attempt(told)


def _timed(bench: Bench, calls: Calls, row: NonlinearRow) -> dict[str, Entry]:
    def entry(call: Callable[[], Any]) -> Entry:
        bench.release()
        # the first call may compile
        bench.time_once(call)
        once = bench.time_once(call)
        timing = Timing(once, once, once)
        if once <= LONG_MS:
            # the loops wait for Python, so the wall clock measures them
            timing = bench.measure(call, wall_clock=True)
        return {"ms": dataclasses.asdict(timing), "us_per_step": timing.median * 1e3 / row.time}

    return {one: converged(partial(entry, call)) for one, call in calls.passes.items()}


def count_iterations(row: NonlinearRow, inputs: Tensors, method: str, gain: int) -> Entry:
    """Return the iterations and the last residual of a call with `gain` times the recurrent weights."""
    if reason := left_out(row, method):
        return {"missing": reason}
    x, state, *weights = inputs

    def counted() -> Entry:
        report = Convergence().to(x.device)
        options = {**METHODS[method], "convergence": report, "max_iterations": MAX_ITERATIONS}
        with torch.no_grad():
            run(x, state, *(gain * W for W in weights), cell=row.cell, **options)
        return {"iterations": int(report.iterations), "residual": float(report.residual)}

    return converged(counted)


def show(console: Console, results: dict[str, Any]) -> None:
    """Print the times and their ratios to the loop, then iterations, then the errors."""
    rows = [row for row in results["rows"] if "passes" in row]

    def cells(entry: Entry) -> list[str]:
        ratio = f"{entry['ratio']:.1f}" if "ratio" in entry else "-"
        return [f"{entry['ms']['median']:.3f}", f"{entry['us_per_step']:.1f}", ratio]

    def counted(entry: Entry) -> list[str]:
        if "missing" in entry:
            return [entry["missing"]]
        return [str(entry["iterations"]), f"{entry['residual']:.2g}"]

    show_table(
        console,
        "milliseconds of a call, microseconds of a step; times as fast as the loop",
        ("row", "pass", "", "ms", "us/step", "x"),
        implementations_of(rows, cells),
        left=3,
        wrap=("ms",),
    )
    show_table(
        console,
        "iterations of Newton's modes, by the gain of the recurrent weights",
        ("row", "mode", "gain", "iterations", "residual"),
        [
            [row["name"], mode, gain, *counted(entry)]
            for row in rows
            for mode, gains in row["iterations"].items()
            for gain, entry in gains.items()
        ],
        left=3,
        wrap=("iterations",),
    )
    show_errors(console, results["rows"])
