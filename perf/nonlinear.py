"""nonlinear_scan: cells, rows, correctness, measurement, Newton's iterations, and torch's layers."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from linrec.ops.core.backends import choose
from linrec.ops.core.call import Call, Result
from linrec.ops.nonlinear_scan import OPERATOR, Convergence, ConvergenceError, nonlinear_scan
from linrec.testing import assert_agree
from perf.loops import layer_calls
from perf.memory import release, why
from perf.operations import normal
from perf.ops import failure
from perf.peers import Calls, torch_calls
from perf.rows import PASSES
from perf.timing import Budget, Timing, measure, time_once

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
NAMES = (*METHODS, *LAYERS)
# the rules by which a row leaves out a method
LOOP_STEPS, NEWTON_STATE = 1000, 64
GAINS = (1, 3)
MAX_ITERATIONS = 50
# a call that takes longer is timed once
LONG_MS = 1000.0


@dataclass(frozen=True)
class NonlinearRow:
    """A cell and its sizes; LEM's state has two numbers for each channel."""

    cell: str
    size: int
    time: int
    batch: int

    @property
    def name(self) -> str:
        """The name that --rows takes, such as "lem-n64-t1000"."""
        return f"{self.cell}-n{self.size}-t{self.time}"

    @property
    def state(self) -> int:
        """Numbers in the state of a sequence."""
        return 2 * self.size if self.cell == "lem" else self.size


def nonlinear_rows_of(device_type: str, *, quick: bool = False) -> list[NonlinearRow]:
    """Return the rows of a device; `quick` keeps the cells, at a size of no meaning."""
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


def make(row: NonlinearRow, device: torch.device) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return x, the state's zeros and the weights, uniform as torch's, and the gradient of h."""
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


def outcome(row: NonlinearRow, inputs: tuple[Tensor, ...], dh: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """Return h and all gradients of the first steps."""
    x, *others = inputs
    first = (x[:, :CHECKED_STEPS], *others)
    calls = torch_calls(partial(run, cell=row.cell, **options), first, dh[:, :CHECKED_STEPS])
    return calls.output(), *calls.both()


def check_nonlinear(
    row: NonlinearRow,
    inputs: tuple[Tensor, ...],
    dh: Tensor,
    method: str,
    expected: tuple[Tensor, ...],
) -> None:
    """Compare outputs and gradients of a method with the loop in double precision.

    Raises:
        AssertionError: they differ by more than the tolerance of float32.
    """
    names = ("h", "dx", "dstate", "dW", "dW_y")
    found = outcome(row, inputs, dh, **METHODS[method])
    for name, mine, right in zip(names, found, expected, strict=False):
        assert_agree(mine, right, name, dtype=torch.float32)


def measure_nonlinear(row: NonlinearRow, device: torch.device, budget: Budget) -> dict[str, Any]:
    """Check and time the methods, count iterations, and time torch's layers.

    Returns:
        What JSON holds of the row: "passes" has, for each of `PASSES` and of `NAMES`, "ms", "us_per_step" and
        "ratio" to the loop where the loop is timed; or "missing". "iterations" has, for each of Newton's
        modes and each gain, "iterations" and "residual"; or "missing". With "error" where a method is wrong.
    """
    result: dict[str, Any] = {"name": row.name, **dataclasses.asdict(row), "checked": CHECKED}
    inputs, dh = make(row, device)
    expected = outcome(row, tuple(x.double() for x in inputs), dh.double(), backend="reference")
    entries: dict[str, dict[str, Any]] = {}
    for method, options in METHODS.items():
        if reason := left_out(row, method):
            entries[method] = missing(reason)
            continue
        if wrong := failure(partial(check_nonlinear, row, inputs, dh, method, expected)):
            return result | {"error": f"{method}: {wrong}"}
        calls = torch_calls(partial(run, cell=row.cell, **options), inputs, dh)
        entries[method] = _timed(calls, row, device, budget)
    for name, layer in LAYERS.items():
        made = layer(row.size, row.size, batch_first=True, device=device)
        entries[name] = _timed(layer_calls(made, dh[..., : row.size].contiguous()), row, device, budget)
    for one in PASSES:
        for entry in entries.values():
            if "ms" in entry[one] and "ms" in entries[LOOP][one]:
                entry[one]["ratio"] = entries[LOOP][one]["ms"]["median"] / entry[one]["ms"]["median"]
    iterations = {
        method: {f"x{gain}": _iterations(row, inputs, method, gain) for gain in GAINS}
        for method in (NEWTON, QUASI, DAMPED)
    }
    release(device)
    passes = {one: {name: entries[name][one] for name in NAMES} for one in PASSES}
    return result | {"passes": passes, "iterations": iterations}


def run_as(call: Call, mode: str, **changes: Any) -> Result:
    """Run a call of `nonlinear_scan`, seen by a handler, in a mode and with other arguments."""
    inputs = call.inputs._replace(**changes)
    device, name = inputs.x.device.type, call.backend.name
    return OPERATOR.run(inputs, choose(OPERATOR.name, OPERATOR.backends, inputs, device, mode, name))


def left_out(row: NonlinearRow, method: str) -> str | None:
    """Return the rule by which a row leaves out a method, or None."""
    if method == LOOP and row.time > LOOP_STEPS:
        return f"over {LOOP_STEPS:,} steps"
    if method == NEWTON and row.state > NEWTON_STATE:
        return f"state over {NEWTON_STATE}"
    return None


def missing(reason: str) -> dict[str, Any]:
    """Return the entries of a method that is not timed."""
    return {one: {"missing": reason} for one in PASSES}


def _timed(calls: Calls, row: NonlinearRow, device: torch.device, budget: Budget) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one, call in zip(PASSES, (calls.forward, calls.both), strict=True):
        release(device)
        try:
            timing = _timing(call, device, budget)
        except ConvergenceError:
            found[one] = {"missing": "no convergence"}
        except Exception as error:
            found[one] = {"missing": why(error)}
        else:
            us = timing.median * 1e3 / row.time
            found[one] = {"ms": dataclasses.asdict(timing), "us_per_step": us}
    return found


def _timing(call: Callable[[], Any], device: torch.device, budget: Budget) -> Timing:
    # the first call may compile
    time_once(call, device)
    once = time_once(call, device)
    # Python's time counts, so the clock on the wall is the measure
    return Timing(once, once, once) if once > LONG_MS else measure(call, device, budget, wall_clock=True)


def _iterations(row: NonlinearRow, inputs: tuple[Tensor, ...], method: str, gain: int) -> dict[str, Any]:
    """Return the iterations and the last residual of a call with recurrent weights times a gain."""
    if reason := left_out(row, method):
        return {"missing": reason}
    x, state, *weights = inputs
    report = Convergence().to(x.device)
    options = {**METHODS[method], "convergence": report, "max_iterations": MAX_ITERATIONS}
    try:
        with torch.no_grad():
            run(x, state, *(gain * W for W in weights), cell=row.cell, **options)
    except ConvergenceError:
        return {"missing": "no convergence"}
    except Exception as error:
        return {"missing": why(error)}
    return {"iterations": int(report.iterations), "residual": float(report.residual)}
