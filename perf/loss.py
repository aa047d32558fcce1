"""`python -m perf loss`: the head and its cross-entropy, beside logits in one piece and Liger's kernel."""

import dataclasses
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional

from linrec.lab.train.fabric import matmul_precision
from linrec.models.compilation import compiling
from linrec.nn.cross_entropy import linear_cross_entropy
from perf import engine
from perf.engine import Entry, Report, RowOptions, Tensors
from perf.operations import normal
from perf.table import gib, show_errors, show_table
from perf.timing import Bench, UnsuitedError

CHECKED = "the loss and the gradients of x and of the weight, against pieces in float64"
LINREC, COMPILED, WHOLE, LIGER = "linrec", "linrec, compiled", "logits in one piece", "liger"

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x (n, d), weight (v, d), targets (n)) -> the mean loss"""


@dataclass(frozen=True)
class LossOptions(RowOptions):
    """Speed and memory of the head and its cross-entropy, forward and backward, without all logits in memory.

    Args:
        peers: also measure Liger's fused kernel.
        out: folder for DEVICE.json.
    """

    peers: bool = False
    out: Path = Path("results/loss")


def loss(options: LossOptions, command: str) -> int:
    """Measure the rows, write and print the results; return the exit status."""
    rows = engine.selected(options.rows, engine.by_name((QUICK,) if options.quick else ROWS))
    names = [name for name in LOSSES if options.peers or name != LIGER]
    bench = engine.bench_of(options)
    report = Report(options, command, packages=("liger-kernel",) if options.peers else ())
    with matmul_precision("high"):
        _, rate = engine.large_product(bench, _dtype(bench.device), quick=options.quick)
        report.results["matmul_rate"] = rate
        report.measure(rows, lambda row: measure_loss(bench, row, rate, names))
    return report.finish(show)


@dataclass(frozen=True)
class LossRow:
    """n rows of width d, and v classes; x in bfloat16 on CUDA, the weight in float32 under autocast."""

    n: int
    d: int
    v: int

    @property
    def name(self) -> str:
        """The name, such as "16384x1024x32000"."""
        return f"{self.n}x{self.d}x{self.v}"

    @property
    def operations(self) -> int:
        """The operations of three products: the logits, and the gradients of x and of the weight."""
        return 3 * 2 * self.n * self.d * self.v


# the tokens of a training step of `perf training --models`, and of HGRN's model of 46M parameters
ROWS = (LossRow(16_384, 1024, 32_000), LossRow(16_384, 1024, 128_000), LossRow(65_536, 512, 50_265))
QUICK = LossRow(12, 8, 20)


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _linrec(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return linear_cross_entropy(x, weight, None, targets)[0] / len(targets)


def _whole(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(x, weight).float(), targets)


def _liger() -> Loss:
    if importlib.util.find_spec("liger_kernel") is None:
        raise UnsuitedError("is not installed")
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    # sums of the weight's gradient in float32, as linrec's
    fused = LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.float32)
    return lambda x, weight, targets: fused(weight.to(x.dtype), x, targets)


LOSSES: dict[str, Callable[[], Loss]] = {
    LINREC: lambda: _linrec,
    # as training compiles it
    COMPILED: lambda: torch.compile(_linrec),
    WHOLE: lambda: _whole,
    LIGER: _liger,
}


def make(row: LossRow, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, the weight and the targets; logits have a standard deviation of 1."""
    random = torch.Generator(device).manual_seed(1)
    x = normal((row.n, row.d), _dtype(device), random)
    weight = normal((row.v, row.d), torch.float32, random) / row.d**0.5
    targets = torch.randint(row.v, (row.n,), device=device, generator=random)
    return x.requires_grad_(), weight.requires_grad_(), targets


def both(loss: Loss, x: Tensor, weight: Tensor, targets: Tensor) -> Tensors:
    """Return the loss and the gradients of x and of the weight, under autocast in bfloat16 on CUDA."""
    with compiling():
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=x.is_cuda):
            value = loss(x, weight, targets)
        return value, *torch.autograd.grad(value, (x, weight))


def check(loss: Loss, row: LossRow, device: torch.device) -> None:
    """Compare with pieces in float64, by the tolerance of x's dtype."""
    x, weight, targets = make(row, device)
    # weights as autocast rounds them
    rounded = weight.detach().to(x.dtype).double().requires_grad_()
    expected = both(_linrec, x.detach().double().requires_grad_(), rounded, targets)
    found = both(loss, x, weight, targets)
    # the gradients of a mean are small
    sizes = [right.abs().max() for right in expected]
    mine, right = ([y / size for y, size in zip(ys, sizes, strict=True)] for ys in (found, expected))
    engine.assert_all_agree(("loss", "dx", "dweight"), mine, right, x.dtype)


def measure_loss(bench: Bench, row: LossRow, rate: float, names: list[str]) -> dict[str, Any]:
    """Check and time the losses; "share" is of `rate`, that of a large product."""
    result: dict[str, Any] = {"name": row.name, **dataclasses.asdict(row), "checked": CHECKED, "losses": {}}

    def measured(name: str) -> Entry:
        function = LOSSES[name]()
        if wrong := engine.failure(partial(check, function, row, bench.device)):
            return {"missing" if name in (WHOLE, LIGER) else "error": wrong}
        call = partial(both, function, *make(row, bench.device))
        peak = bench.peak_of(call)
        entry = engine.timed(bench, call)
        share = row.operations / rate / entry["ms"]["median"] * 1e3
        return entry | {"share": share, "peak_bytes": peak}

    for name in names:
        entry = engine.attempt(partial(measured, name))
        if "error" in entry:
            return result | {"error": f"{name}: {entry['error']}"}
        result["losses"][name] = entry
    return result


def show(console: Console, results: dict[str, Any]) -> None:
    """Print times, shares and memory, then the errors."""

    def cells(entry: Entry) -> list[str]:
        if "missing" in entry:
            return [entry["missing"]]
        return [f"{entry['ms']['median']:.2f}", f"{100 * entry['share']:.0f}", gib(entry["peak_bytes"])]

    show_table(
        console,
        "forward and backward; % of the rate of a large matrix product; GiB over the inputs, with gradients",
        ("rows x width x classes", "", "ms", "%", "GiB"),
        [
            [row["name"], name, *cells(entry)]
            for row in results["rows"]
            for name, entry in row["losses"].items()
        ],
        left=2,
        wrap=("ms",),
    )
    show_errors(console, results["rows"])
