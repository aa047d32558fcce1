"""`python -m perf learners`: steps of real-time recurrent learning, beside truncated backpropagation."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from linrec import mixers
from linrec.learning import Learner, build_learner
from linrec.trees import leaves
from perf import engine
from perf.engine import Report, RowOptions
from perf.table import show_errors, show_table
from perf.timing import Bench

CHECKED = "the gradients of two chunks, against backpropagation through both"
ARGUMENTS: dict[str, dict[str, Any]] = {
    "lru": {},
    "min_gru": {},
    "rg_lru": {},
    "hgru": {},
    "s5": {},
    # as many heads as channels of a key: each value has a state of its own
    "gate_loop": {"n_heads": 64, "d_qk": 64},
}
"""The mixers and their arguments at width 64."""
CHUNK, QUICK_CHUNK = 256, 8
TURNS, QUICK_TURNS = 30, 2


@dataclass(frozen=True)
class LearnersOptions(RowOptions):
    """Time of element-wise RTRL for a chunk of 256 steps, as times of the same chunk by `tbptt`.

    Args:
        out: folder for DEVICE.json.
    """

    out: Path = Path("results/learners")


@dataclass(frozen=True)
class LearnerRow:
    """A mixer of width `size`, and a batch of chunks of `time` steps."""

    mixer: str
    batch: int
    time: int = CHUNK
    size: int = 64

    @property
    def name(self) -> str:
        """The name, such as "lru-b32"."""
        return f"{self.mixer}-b{self.batch}-t{self.time}"


def learners(options: LearnersOptions, command: str) -> int:
    """Measure the rows, write and print the results; return the exit status."""
    time = QUICK_CHUNK if options.quick else CHUNK
    rows = [LearnerRow(mixer, batch, time) for mixer in ARGUMENTS for batch in (1, 32)]
    # a chunk of a single step, as `learner.step` learns it
    rows.append(LearnerRow("lru", 1, 1))
    taken = engine.selected(options.rows, engine.by_name(rows))
    report, bench = Report(options, command), engine.bench_of(options)
    turns = QUICK_TURNS if options.quick else TURNS
    report.measure(taken, lambda row: measure_learner(bench, row, turns))
    return report.finish(show)


def make(row: LearnerRow, name: str, device: torch.device) -> Learner:
    """Return a learner of the mixer alone, with a squared error at every step and plain gradient descent."""
    torch.manual_seed(0)
    mixer = mixers.get(row.mixer)(row.size, **ARGUMENTS[row.mixer]).to(device)
    optimizer = torch.optim.SGD(mixer.parameters(), lr=1e-6)
    options = {"window": row.time} if name == "tbptt" else {}
    return build_learner(name, mixer, optimizer, loss=squared_error, **options)


def squared_error(prediction: Tensor, target: Tensor) -> Tensor:
    """Return the squared error of every step (b, t)."""
    return (prediction - target).square().mean(-1)


def check_learner(row: LearnerRow, x: Tensor, y: Tensor) -> None:
    """Compare the gradients of two chunks with backpropagation through both at once."""
    found, whole = make(row, "rtrl", x.device), make(row, "bptt", x.device)
    for _ in range(2):
        found.chunk(x, y, update=False)
    whole.chunk(torch.cat([x, x], 1), torch.cat([y, y], 1), update=False)
    expected = whole.gradients()
    for name, gradient in found.gradients().items():
        # relative to the largest entry: chunks add up in another order
        scale = expected[name].abs().max().clamp(min=1e-30)
        torch.testing.assert_close(gradient / scale, expected[name] / scale, rtol=0, atol=2e-3, msg=name)


def measure_learner(bench: Bench, row: LearnerRow, turns: int) -> dict[str, Any]:
    """Check RTRL, then time it and `tbptt` in turns; the load of the machine changes within seconds."""
    result: dict[str, Any] = {"name": row.name, **dataclasses.asdict(row), "checked": CHECKED}
    random = torch.Generator(bench.device).manual_seed(1)
    x, y = (
        torch.randn(row.batch, row.time, row.size, generator=random, device=bench.device) for _ in range(2)
    )
    if wrong := engine.failure(lambda: check_learner(row, x, y)):
        return result | {"error": wrong}
    taken = {name: make(row, name, bench.device) for name in ("tbptt", "rtrl")}
    times: dict[str, list[float]] = {name: [] for name in taken}
    for turn in range(turns + 2):
        for name, learner in taken.items():
            once = bench.time_once(lambda learner=learner: learner.chunk(x, y))  # type: ignore[misc]
            # the first turns compile and fill caches
            if turn > 1:
                times[name].append(once)
    ms = {name: min(found) for name, found in times.items()}
    n_bytes = {
        name: sum(part.nbytes for part in leaves(learner.memory) if isinstance(part, Tensor))
        for name, learner in taken.items()
    }
    ratio = ms["rtrl"] / ms["tbptt"]
    return result | {"least_ms": ms, "ratio": ratio, "turns": turns, "memory_bytes": n_bytes}


def show(console: Console, results: dict[str, Any]) -> None:
    """Print the times, their ratio and the memory, then the errors."""
    show_table(
        console,
        "fewest milliseconds of a chunk; RTRL's time as times of TBPTT's; KiB that a learner carries",
        ("row", "tbptt", "rtrl", "x", "KiB tbptt", "KiB rtrl"),
        [
            [
                row["name"],
                *(f"{row['least_ms'][name]:.2f}" for name in ("tbptt", "rtrl")),
                f"{row['ratio']:.2f}",
                *(f"{row['memory_bytes'][name] / 1024:.1f}" for name in ("tbptt", "rtrl")),
            ]
            for row in results["rows"]
            if "ratio" in row
        ],
    )
    show_errors(console, results["rows"])
