"""`python -m perf learners`: real-time recurrent learning, beside backpropagation: time, memory and bias."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linrec import mixers
from linrec.learning import Learner, build_learner
from linrec.models import SequenceClassifier, SequenceClassifierConfig
from linrec.models.compilation import EAGER_STEPS
from linrec.trees import leaves
from perf import engine
from perf.command import Named, RowCommand
from perf.engine import Record
from perf.table import Part, Table, errors
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
TBPTT, RTRL = TIMED = "tbptt", "rtrl"
RING = {"r_min": 0.9, "r_max": 0.999}
STACKS: dict[tuple[str, int], dict[str, Any]] = {
    ("lru", 2): RING,
    ("lru", 4): RING,
    ("min_gru", 2): {},
    ("gate_loop", 2): {"n_heads": 16, "d_qk": 16},
}
"""The mixers and numbers of layers of the stacks whose bias is measured, with arguments at width 16."""
DELAY, SEEDS = 10, (0, 1, 2)
RIVALS: dict[str, tuple[str, dict[str, Any]]] = {
    "chunk": (RTRL, {"credit": "chunk"}),
    "spatial": (RTRL, {"credit": "spatial"}),
    TBPTT: (TBPTT, {}),
}
"""The learners whose bias is measured: two kinds of credit of `rtrl`, and windows as long as the chunks."""


@dataclass(frozen=True)
class LearnerRow(Named):
    """A mixer of width `size`, and a batch of chunks of `time` steps."""

    mixer: str
    batch: int
    time: int
    size: int = 64

    # such as "lru-b32-t256"
    template = "{row.mixer}-b{row.batch}-t{row.time}"


@dataclass(frozen=True)
class BiasRow(Named):
    """A stack of layers, and chunks of `time` steps of a stream."""

    mixer: str
    layers: int
    time: int

    # such as "4-lru-t16"
    template = "{row.layers}-{row.mixer}-t{row.time}"


@dataclass(frozen=True)
class Learners(RowCommand):
    """Time of element-wise RTRL for a chunk of 256 steps, as times of the same chunk by `tbptt`.

    Args:
        bias: measure the direction of gradients in stacks instead, beside the whole stream's gradient, and
            write DEVICE-bias.json.
    """

    bias: bool = False

    @property
    def suffix(self) -> str:
        return "-bias" if self.bias else ""

    @property
    def steps(self) -> int:
        return 64 if self.quick else 256

    def all_rows(self) -> Sequence[LearnerRow | BiasRow]:
        if self.bias:
            return [BiasRow(mixer, layers, time) for mixer, layers in STACKS for time in (1, 16, 64)]
        time = 8 if self.quick else 256
        rows = [LearnerRow(mixer, batch, time) for mixer in ARGUMENTS for batch in (1, 32)]
        # a chunk of a single step, as `learner.step` learns it
        return [*rows, LearnerRow("lru", 1, 1)]

    def about(self, bench: Bench) -> tuple[Bench, Record]:
        return bench, {"steps": self.steps, "seeds": len(SEEDS), "delay": DELAY} if self.bias else {}

    def measure(self, bench: Bench, row: LearnerRow | BiasRow) -> Record:
        if isinstance(row, BiasRow):
            return {**row.head(), "cosines": cosines(row, self.steps, bench.device)}
        return {**row.head(), "checked": CHECKED, **times(bench, row, 2 if self.quick else 30)}

    @staticmethod
    def show(results: Record) -> Iterator[Part]:
        rows = [row for row in results["rows"] if "least_ms" in row]
        captured = (
            "captured {least_ms[tbptt captured]:.2f} | captured {least_ms[rtrl captured]:.2f} | "
            "x {captured_ratio:.2f} | "
        )
        yield Table(
            "fewest milliseconds of a chunk; RTRL's time as times of TBPTT's; KiB that RTRL carries",
            "row {name} | tbptt {least_ms[tbptt]:.2f} | rtrl {least_ms[rtrl]:.2f} | x {ratio:.2f} | "
            + (captured if any("captured_ratio" in row for row in rows) else "")
            + "KiB {memory_bytes[rtrl]:.1f KiB}",
            rows,
        )
        yield Table(
            "cosine with the gradient of the whole stream, of each layer's mixer, bottom layer first",
            " | ".join(["row {name}", *(f"{name} {{cosines[{name}]:.3f}}" for name in RIVALS)]),
            [row for row in results["rows"] if "cosines" in row],
            wrap=tuple(RIVALS),
        )
        yield from errors(results["rows"])


def times(bench: Bench, row: LearnerRow, turns: int) -> Record:
    """Check RTRL, then time it and `tbptt` in turns, as the load of the machine changes within seconds.

    On a CUDA device, both are timed as replayed graphs too.
    """
    random = torch.Generator(bench.device).manual_seed(1)
    shape = (row.batch, row.time, row.size)
    x, y = (torch.randn(shape, generator=random, device=bench.device) for _ in range(2))
    if wrong := engine.failure(lambda: check_learner(row, x, y)):
        return {"error": wrong}
    taken = {name: make(row, name, bench.device) for name in TIMED}
    if bench.on_cuda:
        taken |= {f"{name} captured": make(row, name, bench.device, capture=True) for name in TIMED}
    found: dict[str, list[float]] = {name: [] for name in taken}
    # the first turns compile, fill caches and capture
    warm = EAGER_STEPS + 2
    for turn in range(turns + warm):
        for name, learner in taken.items():
            once = bench.time_once(lambda learner=learner: learner.chunk(x, y))  # type: ignore[misc]
            if turn >= warm:
                found[name].append(once)
    ms = {name: min(of) for name, of in found.items()}
    memory = {
        name: sum(part.nbytes for part in leaves(taken[name].memory) if isinstance(part, Tensor))
        for name in TIMED
    }
    result = {"least_ms": ms, "ratio": ms[RTRL] / ms[TBPTT], "turns": turns, "memory_bytes": memory}
    if bench.on_cuda:
        result["captured_ratio"] = ms[f"{RTRL} captured"] / ms[f"{TBPTT} captured"]
    return result


def make(row: LearnerRow, name: str, device: torch.device, *, capture: bool = False) -> Learner:
    """Return a learner of the mixer alone, with a squared error at every step and plain gradient descent."""
    torch.manual_seed(0)
    mixer = mixers.get(row.mixer)(row.size, **ARGUMENTS[row.mixer]).to(device)
    optimizer = torch.optim.SGD(mixer.parameters(), lr=1e-6)
    options = {"window": row.time} if name == TBPTT else {}
    return build_learner(name, mixer, optimizer, loss=squared_error, capture=capture, **options)


def squared_error(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction - target).square().mean(-1)


def check_learner(row: LearnerRow, x: Tensor, y: Tensor) -> None:
    """Compare the gradients of two chunks with backpropagation through both at once."""
    found, whole = make(row, RTRL, x.device), make(row, "bptt", x.device)
    for _ in range(2):
        found.chunk(x, y, update=False)
    whole.chunk(torch.cat([x, x], 1), torch.cat([y, y], 1), update=False)
    expected = whole.gradients()
    for name, gradient in found.gradients().items():
        # relative to the largest entry: chunks add up in another order
        scale = expected[name].abs().max().clamp(min=1e-30)
        torch.testing.assert_close(gradient / scale, expected[name] / scale, rtol=0, atol=2e-3, msg=name)


def cosines(row: BiasRow, steps: int, device: torch.device) -> dict[str, list[float]]:
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
        for name, (learner, arguments) in RIVALS.items():
            window: dict[str, Any] = {"window": row.time} if learner == TBPTT else {}
            rival = build_learner(learner, model, loss=squared_error, **arguments, **window)
            for part in zip(x.split(row.time, 1), y.split(row.time, 1), strict=True):
                rival.chunk(*part)
            found[name].append(cosines_of(rival.gradients(), whole.gradients(), row.layers))
    return {name: [statistics.fmean(of) for of in zip(*each, strict=True)] for name, each in found.items()}


def cosines_of(found: dict[str, Tensor], expected: dict[str, Tensor], layers: int) -> list[float]:
    """Return the cosine of each layer's mixer's gradient with the expected gradient."""

    def joined(gradients: dict[str, Tensor], layer: int) -> Tensor:
        of = [g.flatten() for name, g in gradients.items() if f"blocks.{layer}.mixer." in name]
        return torch.cat([torch.view_as_real(g).flatten() if g.is_complex() else g for g in of])

    pairs = ((joined(found, layer), joined(expected, layer)) for layer in range(layers))
    return [torch.cosine_similarity(mine, right, 0).item() for mine, right in pairs]
