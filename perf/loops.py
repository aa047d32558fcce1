"""`python -m perf loops`: the sLSTM's loop over time, beside torch's LSTM of the same width."""

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from linrec.nn.slstm_steps import slstm_steps
from perf import engine
from perf.engine import BOTH, DTYPES, FORWARD, PASSES, Calls, Entry, Report, RowOptions, Tensors
from perf.operations import normal
from perf.table import implementations_of, show_errors, show_table
from perf.timing import Bench

CHECKED = "h and the gradients of Wx and R, against the loop in float64"
FUSED, LOOP, LSTM = "fused", "loop", "lstm"
BACKENDS = {FUSED: "triton", LOOP: "torch"}


@dataclass(frozen=True)
class LoopsOptions(RowOptions):
    """Speed of the sLSTM's kernel beside the loop in torch operations and torch's LSTM of the same width.

    Args:
        out: folder for DEVICE.json.
    """

    out: Path = Path("results/loops")


def loops(options: LoopsOptions, command: str) -> int:
    """Measure the rows, write and print the results; return the exit status."""
    rows = engine.selected(options.rows, engine.by_name(loop_rows_of(options.device, quick=options.quick)))
    report, bench = Report(options, command), engine.bench_of(options)
    report.measure(rows, lambda row: measure_loop(bench, row))
    return report.finish(show)


@dataclass(frozen=True)
class LoopRow:
    """Sizes of a loop; `dtype` is the recurrent weights' dtype, the gates have float32."""

    batch: int
    size: int
    dtype: str
    time: int = 300
    heads: int = 4

    @property
    def name(self) -> str:
        """The name, such as "b16-d64-bf16"."""
        return f"b{self.batch}-d{self.size}-{self.dtype}"


def loop_rows_of(device_type: str, *, quick: bool = False) -> list[LoopRow]:
    """Return the rows of a device; `quick` keeps the dtypes, at a meaningless size."""
    dtypes = ("f32", "bf16") if device_type == "cuda" else ("f32",)
    if quick:
        return [LoopRow(2, 4, dtype, time=3, heads=2) for dtype in dtypes]
    return [LoopRow(batch, size, dtype) for batch in (16, 128) for size in (64, 128, 256) for dtype in dtypes]


def make(row: LoopRow, device: torch.device) -> tuple[Tensors, Tensor]:
    """Return Wx (b, t, 4, h, d) and R (h, d, 4 d), and the gradient of h."""
    random = torch.Generator(device).manual_seed(1)
    shape = (row.batch, row.time, row.heads, row.size)
    Wx = normal((*shape[:2], 4, *shape[2:]), torch.float32, random)
    R = normal((row.heads, row.size, 4 * row.size), torch.float32, random) / row.size**0.5
    return (Wx, R.to(DTYPES[row.dtype])), normal(shape, torch.float32, random)


def run(Wx: Tensor, R: Tensor, *, backend: str) -> Tensor:
    """Return h of every step, from the state of a new sequence."""
    zeros = torch.zeros_like(Wx[:, 0, 0], dtype=torch.promote_types(Wx.dtype, torch.float32))
    start = (zeros, zeros, zeros, torch.full_like(zeros, -torch.inf))
    return slstm_steps(Wx, R, start, backend=backend)[0]


def check_loop(row: LoopRow, inputs: Tensors, dy: Tensor, backend: str) -> None:
    """Compare outputs and gradients with the loop in double precision, by the weights' tolerance."""
    wide = tuple(x.double() for x in inputs)
    expected = engine.outputs_and_gradients(partial(run, backend="torch"), wide, dy.double())
    found = engine.outputs_and_gradients(partial(run, backend=backend), inputs, dy)
    engine.assert_all_agree(("h", "dWx", "dR"), found, expected, DTYPES[row.dtype])


def layer_calls(layer: nn.RNNBase, x: Tensor) -> Calls:
    """Return the calls of a recurrent layer of torch, which also projects its inputs."""
    weights = list(layer.parameters())
    given = x.clone().requires_grad_()

    def forward() -> Tensor:
        with torch.no_grad():
            return layer(x)[0]

    def both() -> Tensors:
        return torch.autograd.grad(layer(given)[0], [given, *weights], x)

    return Calls({FORWARD: forward, BOTH: both}, lambda: (forward(),))


def measure_loop(bench: Bench, row: LoopRow) -> dict[str, Any]:
    """Check and time the kernel and the loop, and time torch's LSTM."""
    result: dict[str, Any] = {"name": row.name, **dataclasses.asdict(row), "checked": CHECKED}
    inputs, dy = make(row, bench.device)
    entries: dict[str, dict[str, Entry]] = {}

    def time_passes(calls: Calls) -> dict[str, Entry]:
        return {name: engine.launched(bench, call) for name, call in calls.passes.items()}

    for name, backend in BACKENDS.items():
        if name == FUSED and not bench.on_cuda:
            entries[name] = {one: {"missing": "runs on CUDA alone"} for one in PASSES}
            continue
        if wrong := engine.failure(partial(check_loop, row, inputs, dy, backend)):
            return result | {"error": f"{name}: {wrong}"}
        entries[name] = time_passes(engine.calls_of(partial(run, backend=backend), inputs, dy))
    width, dtype = row.heads * row.size, DTYPES[row.dtype]

    def lstm() -> dict[str, Entry]:
        layer = nn.LSTM(width, width, batch_first=True, device=bench.device, dtype=dtype)
        return time_passes(layer_calls(layer, dy.flatten(2).to(dtype)))

    found = engine.attempt(lstm)
    entries[LSTM] = dict.fromkeys(PASSES, found) if "missing" in found else found
    bench.release()
    return result | {"passes": engine.by_pass(entries, LOOP)}


def show(console: Console, results: dict[str, Any]) -> None:
    """Print the times and their ratios to the loop, then the errors."""

    def cells(entry: Entry) -> list[str]:
        times = [f"{entry[time]['median']:.3f}" for time in ("ms", "called_ms")]
        return times + [f"{entry[ratio]:.1f}" for ratio in ("ratio", "called_ratio")]

    show_table(
        console,
        "milliseconds of a call on the device and as Python launches it; times as fast as the loop",
        ("row", "pass", "", "ms", "called", "x", "called x"),
        implementations_of((row for row in results["rows"] if "passes" in row), cells),
        left=3,
        wrap=("ms",),
    )
    show_errors(console, results["rows"])
