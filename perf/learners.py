"""`python -m perf learners`: real-time recurrent learning, beside backpropagation: time, memory and bias."""

import dataclasses
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from linrec import mixers
from linrec.learning import Learner, build_learner
from linrec.models import SequenceClassifier, SequenceClassifierConfig
from linrec.models.compilation import EAGER_STEPS
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
RING = {"r_min": 0.9, "r_max": 0.999}
STACKS: dict[tuple[str, int], dict[str, Any]] = {
    ("lru", 2): RING,
    ("lru", 4): RING,
    ("min_gru", 2): {},
    ("gate_loop", 2): {"n_heads": 16, "d_qk": 16},
}
"""The mixers and numbers of layers of the stacks whose bias is measured, with arguments at width 16."""
STEPS, DELAY, SEEDS = 256, 10, (0, 1, 2)
RIVALS: dict[str, tuple[str, dict[str, Any]]] = {
    "chunk": ("rtrl", {"credit": "chunk"}),
    "spatial": ("rtrl", {"credit": "spatial"}),
    "tbptt": ("tbptt", {}),
}
"""The learners whose bias is measured: two kinds of credit of `rtrl`, and windows as long as the chunks."""
TURNS, QUICK_TURNS = 30, 2


@dataclass(frozen=True)
class LearnersOptions(RowOptions):
    """Time of element-wise RTRL for a chunk of 256 steps, as times of the same chunk by `tbptt`.

    Args:
        bias: measure the direction of gradients in stacks instead, beside the whole stream's gradient.
        out: folder for DEVICE.json or, with `bias`, DEVICE-bias.json.
    """

    bias: bool = False
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
    if options.bias:
        return bias(options, command)
    time = QUICK_CHUNK if options.quick else CHUNK
    rows = [LearnerRow(mixer, batch, time) for mixer in ARGUMENTS for batch in (1, 32)]
    # a chunk of a single step, as `learner.step` learns it
    rows.append(LearnerRow("lru", 1, 1))
    taken = engine.selected(options.rows, engine.by_name(rows))
    report, bench = Report(options, command), engine.bench_of(options)
    turns = QUICK_TURNS if options.quick else TURNS
    report.measure(taken, lambda row: measure_learner(bench, row, turns))
    return report.finish(show)


@dataclass(frozen=True)
class BiasRow:
    """A stack of layers, and chunks of `time` steps of a stream."""

    mixer: str
    layers: int
    time: int

    @property
    def name(self) -> str:
        """The name, such as "4-lru-t16"."""
        return f"{self.layers}-{self.mixer}-t{self.time}"


def bias(options: LearnersOptions, command: str) -> int:
    """Measure the directions of gradients, write and print the results; return the exit status."""
    rows = [BiasRow(mixer, layers, time) for mixer, layers in STACKS for time in (1, 16, 64)]
    taken = engine.selected(options.rows, engine.by_name(rows))
    steps = 64 if options.quick else STEPS
    report = Report(options, command, suffix="-bias", steps=steps, seeds=len(SEEDS), delay=DELAY)
    report.measure(taken, lambda row: measure_bias(row, steps, torch.device(options.device)))
    return report.finish(show_bias)


def measure_bias(row: BiasRow, steps: int, device: torch.device) -> dict[str, Any]:
    """Return the cosines of the layers' recurrent gradients with those of `bptt`, bottom layer first.

    The target is the input of `DELAY` steps before, in float64, for models at their start. Cosines are means
    over seeds.
    """
    found: dict[str, list[list[float]]] = {name: [] for name in RIVALS}
    for seed in SEEDS:
        torch.manual_seed(seed)
        config = SequenceClassifierConfig(
            n_outputs=16,
            n_features=16,
            d_model=16,
            n_layers=row.layers,
            mixer=row.mixer,
            mixer_args=STACKS[row.mixer, row.layers],
            bidirectional=False,
            pooling="none",
        )
        model = SequenceClassifier(config).double().to(device)
        x = torch.randn(1, steps, 16, dtype=torch.float64).to(device)
        y = torch.cat([torch.zeros_like(x[:, :DELAY]), x[:, :-DELAY]], 1)
        whole = build_learner("bptt", model, loss=squared_error)
        whole.chunk(x, y)
        expected = whole.gradients()
        for name, (learner, arguments) in RIVALS.items():
            window: dict[str, Any] = {"window": row.time} if learner == "tbptt" else {}
            rival = build_learner(learner, model, loss=squared_error, **arguments, **window)
            for part in zip(x.split(row.time, 1), y.split(row.time, 1), strict=True):
                rival.chunk(*part)
            found[name].append(cosines(rival.gradients(), expected, row.layers))
    means = {name: [statistics.fmean(of) for of in zip(*each, strict=True)] for name, each in found.items()}
    return {"name": row.name, **dataclasses.asdict(row), "cosines": means}


def cosines(found: dict[str, Tensor], expected: dict[str, Tensor], layers: int) -> list[float]:
    """Return the cosine of each layer's mixer's gradient with the expected gradient."""

    def joined(gradients: dict[str, Tensor], layer: int) -> Tensor:
        of = [g.flatten() for name, g in gradients.items() if f"blocks.{layer}.mixer." in name]
        return torch.cat([torch.view_as_real(g).flatten() if g.is_complex() else g for g in of])

    pairs = ((joined(found, layer), joined(expected, layer)) for layer in range(layers))
    return [torch.cosine_similarity(mine, right, 0).item() for mine, right in pairs]


def show_bias(console: Console, results: dict[str, Any]) -> None:
    """Print the cosines of every layer."""
    show_table(
        console,
        "cosine with the gradient of the whole stream, of each layer's mixer, bottom layer first",
        ("row", *RIVALS),
        [
            [row["name"], *(" ".join(f"{of:.3f}" for of in row["cosines"][name]) for name in RIVALS)]
            for row in results["rows"]
        ],
        wrap=tuple(RIVALS),
    )


def make(row: LearnerRow, name: str, device: torch.device, *, capture: bool = False) -> Learner:
    """Return a learner of the mixer alone, with a squared error at every step and plain gradient descent."""
    torch.manual_seed(0)
    mixer = mixers.get(row.mixer)(row.size, **ARGUMENTS[row.mixer]).to(device)
    optimizer = torch.optim.SGD(mixer.parameters(), lr=1e-6)
    options = {"window": row.time} if name == "tbptt" else {}
    return build_learner(name, mixer, optimizer, loss=squared_error, capture=capture, **options)


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
    """Check RTRL, then time it and `tbptt` in turns, as the load of the machine changes within seconds.

    On a CUDA device, both are timed as replayed graphs too.
    """
    result: dict[str, Any] = {"name": row.name, **dataclasses.asdict(row), "checked": CHECKED}
    random = torch.Generator(bench.device).manual_seed(1)
    x, y = (
        torch.randn(row.batch, row.time, row.size, generator=random, device=bench.device) for _ in range(2)
    )
    if wrong := engine.failure(lambda: check_learner(row, x, y)):
        return result | {"error": wrong}
    taken = {name: make(row, name, bench.device) for name in ("tbptt", "rtrl")}
    if bench.on_cuda:
        taken |= {f"{name} captured": make(row, name, bench.device, capture=True) for name in taken}
    times: dict[str, list[float]] = {name: [] for name in taken}
    warm = EAGER_STEPS + 2
    for turn in range(turns + warm):
        for name, learner in taken.items():
            once = bench.time_once(lambda learner=learner: learner.chunk(x, y))  # type: ignore[misc]
            # the first turns compile, fill caches and capture
            if turn >= warm:
                times[name].append(once)
    ms = {name: min(found) for name, found in times.items()}
    n_bytes = {
        name: sum(part.nbytes for part in leaves(taken[name].memory) if isinstance(part, Tensor))
        for name in ("tbptt", "rtrl")
    }
    result |= {"least_ms": ms, "ratio": ms["rtrl"] / ms["tbptt"], "turns": turns, "memory_bytes": n_bytes}
    if bench.on_cuda:
        result["captured_ratio"] = ms["rtrl captured"] / ms["tbptt captured"]
    return result


def _captured(row: dict[str, Any]) -> list[str]:
    """Return the times of replayed graphs and their ratio, or empty cells."""
    ms = row["least_ms"]
    found = ms.get("tbptt captured"), ms.get("rtrl captured"), row.get("captured_ratio")
    return ["" if of is None else f"{of:.2f}" for of in found]


def show(console: Console, results: dict[str, Any]) -> None:
    """Print the times, their ratios and the memory, then the errors."""
    names = "tbptt", "rtrl"
    # of a CUDA device
    captured = any("captured_ratio" in row for row in results["rows"])
    show_table(
        console,
        "fewest milliseconds of a chunk; RTRL's time as times of TBPTT's; KiB that RTRL carries",
        (
            "row",
            *names,
            "x",
            *(("captured", "captured", "x") if captured else ()),
            "KiB",
        ),
        [
            [
                row["name"],
                *(f"{row['least_ms'][name]:.2f}" for name in names),
                f"{row['ratio']:.2f}",
                *_captured(row)[: 3 * captured],
                f"{row['memory_bytes']['rtrl'] / 1024:.1f}",
            ]
            for row in results["rows"]
            if "ratio" in row
        ],
    )
    show_errors(console, results["rows"])
