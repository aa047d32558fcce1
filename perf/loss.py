"""`python -m perf loss`: the head and its cross-entropy, beside logits in one piece and Liger's kernel."""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from linrec.lab.train.fabric import matmul_precision
from linrec.models.compilation import compiling
from linrec.nn.cross_entropy import linear_cross_entropy
from perf import engine
from perf.command import Named, RowCommand
from perf.engine import Record, Tensors
from perf.operations import normal
from perf.table import Part, Table, errors
from perf.timing import Bench, UnsuitedError, share

CHECKED = "the loss and the gradients of x and of the weight, against pieces in float64"

Function = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x (n, d), weight (v, d), targets (n)) -> the mean loss"""


@dataclass(frozen=True)
class LossRow(Named):
    """n rows of width d, and v classes; x in bfloat16 on CUDA, the weight in float32 under autocast."""

    n: int
    d: int
    v: int

    # such as "16384x1024x32000"
    template = "{row.n}x{row.d}x{row.v}"

    @property
    def operations(self) -> int:
        """The operations of three products: the logits, and the gradients of x and of the weight."""
        return 3 * 2 * self.n * self.d * self.v


# the tokens of a training step of `perf training --models`, and of HGRN's model of 46M parameters
ROWS = (LossRow(16_384, 1024, 32_000), LossRow(16_384, 1024, 128_000), LossRow(65_536, 512, 50_265))
QUICK = LossRow(12, 8, 20)


@dataclass(frozen=True)
class Loss(RowCommand):
    """Speed and memory of the head and its cross-entropy, forward and backward, without all logits in memory.

    Args:
        peers: also measure Liger's fused kernel.
    """

    peers: bool = False

    packages = ("liger-kernel",)

    def all_rows(self) -> Sequence[LossRow]:
        return (QUICK,) if self.quick else ROWS

    def about(self, bench: Bench) -> tuple[Bench, Record]:
        with matmul_precision("high"):
            bench, product = bench.with_product(dtype_on(bench.device), quick=self.quick)
        return bench, {"matmul_rate": product["rate"]}

    def measure(self, bench: Bench, row: LossRow) -> Record:
        result: Record = {**row.head(), "checked": CHECKED, "losses": {}}
        for name in LOSSES:
            if name == LIGER and not self.peers:
                continue
            with matmul_precision("high"):
                entry = engine.attempt(partial(measured, bench, row, name))
            if "error" in entry:
                return result | {"error": f"{name}: {entry['error']}"}
            result["losses"][name] = entry
        return result

    @staticmethod
    def show(results: Record) -> Iterator[Part]:
        yield Table(
            "forward and backward; % of the rate of a large matrix product; GiB over the inputs, "
            "with gradients",
            "rows x width x classes {row} | {loss} | ms {ms[median]:.2f} | % {share:.0f %} | "
            "GiB {peak_bytes:.2f GiB}",
            [
                {**entry, "row": row["name"], "loss": name}
                for row in results["rows"]
                for name, entry in row["losses"].items()
            ],
            left=2,
            wrap=("ms",),
        )
        yield from errors(results["rows"])


def measured(bench: Bench, row: LossRow, name: str) -> Record:
    """Check and time a loss; "share" is of the rate of a large product."""
    function = LOSSES[name]()
    if wrong := engine.failure(partial(check, function, row, bench.device)):
        return {"missing" if name in (WHOLE, LIGER) else "error": wrong}
    call = partial(both, function, *make(row, bench.device))
    peak = bench.peak_of(call)
    entry = engine.timed(bench, call)
    of_product = share(row.operations, bench.product, entry["ms"]["median"])
    return entry | {"share": of_product, "peak_bytes": peak}


def dtype_on(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def linrec_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return linear_cross_entropy(x, weight, None, targets)[0] / len(targets)


def whole(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(x, weight).float(), targets)


def liger() -> Function:
    """Return Liger's loss, with float32 sums of the weight's gradient, as linrec's."""
    if importlib.util.find_spec("liger_kernel") is None:
        raise UnsuitedError("is not installed")
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    fused = LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.float32)
    return lambda x, weight, targets: fused(weight.to(x.dtype), x, targets)


WHOLE, LIGER = "logits in one piece", "liger"
LOSSES: dict[str, Callable[[], Function]] = {
    "linrec": lambda: linrec_loss,
    # as training compiles it
    "linrec, compiled": lambda: torch.compile(linrec_loss),
    WHOLE: lambda: whole,
    LIGER: liger,
}


def make(row: LossRow, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, the weight and the targets; logits have a standard deviation of 1."""
    random = torch.Generator(device).manual_seed(1)
    x = normal((row.n, row.d), dtype_on(device), random)
    weight = normal((row.v, row.d), torch.float32, random) / row.d**0.5
    targets = torch.randint(row.v, (row.n,), device=device, generator=random)
    return x.requires_grad_(), weight.requires_grad_(), targets


def both(loss: Function, x: Tensor, weight: Tensor, targets: Tensor) -> Tensors:
    """Return the loss and the gradients of x and of the weight, under autocast in bfloat16 on CUDA."""
    with compiling():
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=x.is_cuda):
            value = loss(x, weight, targets)
        return value, *torch.autograd.grad(value, (x, weight))


def check(loss: Function, row: LossRow, device: torch.device) -> None:
    """Compare with pieces in float64, by the tolerance of x's dtype."""
    x, weight, targets = make(row, device)
    # weights as autocast rounds them
    rounded = weight.detach().to(x.dtype).double().requires_grad_()
    expected = both(linrec_loss, x.detach().double().requires_grad_(), rounded, targets)
    found = both(loss, x, weight, targets)
    # the gradients of a mean are small
    sizes = [right.abs().max() for right in expected]
    mine, right = ([y / size for y, size in zip(ys, sizes, strict=True)] for ys in (found, expected))
    engine.assert_all_agree(("loss", "dx", "dweight"), mine, right, x.dtype)
