"""The head and its cross-entropy: forward and backward, beside the logits in one piece and Liger's kernel."""

import dataclasses
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from linrec.models.compilation import compiling
from linrec.nn.cross_entropy import linear_cross_entropy
from linrec.testing import assert_agree
from perf.memory import peak_bytes, release, why
from perf.operations import normal
from perf.ops import failure
from perf.peers import UnsuitedError
from perf.timing import Budget, measure

CHECKED = "the loss and the gradients of x and of the weight, against pieces in float64"
LINREC, COMPILED, WHOLE, LIGER = "linrec", "linrec, compiled", "logits in one piece", "liger"

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x (n, d), weight (v, d), targets (n)) -> the mean loss"""


@dataclass(frozen=True)
class LossRow:
    """n rows of width d, and v classes; x in bfloat16 on CUDA, the weight in float32 under autocast."""

    n: int
    d: int
    v: int

    @property
    def name(self) -> str:
        """The name that --rows takes, such as "16384x1024x32000"."""
        return f"{self.n}x{self.d}x{self.v}"

    @property
    def operations(self) -> int:
        """The logits, and the gradients of x and of the weight: three products."""
        return 3 * 2 * self.n * self.d * self.v


# the tokens of a training step of `perf training --models`, and of HGRN's model of 46M parameters
ROWS = (LossRow(16_384, 1024, 32_000), LossRow(16_384, 1024, 128_000), LossRow(65_536, 512, 50_265))
QUICK = LossRow(12, 8, 20)


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
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = normal((row.n, row.d), dtype, random)
    weight = normal((row.v, row.d), torch.float32, random) / row.d**0.5
    targets = torch.randint(row.v, (row.n,), device=device, generator=random)
    return x.requires_grad_(), weight.requires_grad_(), targets


def both(loss: Loss, x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """Return the loss and the gradients of x and of the weight, under autocast in bfloat16 on CUDA."""
    with compiling():
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=x.is_cuda):
            value = loss(x, weight, targets)
        return value, *torch.autograd.grad(value, (x, weight))


def check(loss: Loss, row: LossRow, device: torch.device) -> None:
    """Compare with pieces in float64.

    Raises:
        AssertionError: they differ by more than the tolerance of the dtype of x.
    """
    x, weight, targets = make(row, device)
    # weights as autocast rounds them; gradients of a mean are small
    rounded = weight.detach().to(x.dtype).double().requires_grad_()
    expected = both(_linrec, x.detach().double().requires_grad_(), rounded, targets)
    found = both(loss, x, weight, targets)
    for name, mine, right in zip(("loss", "dx", "dweight"), found, expected, strict=True):
        size = right.abs().max()
        assert_agree(mine / size, right / size, name, dtype=x.dtype)


def measure_loss(
    row: LossRow, device: torch.device, budget: Budget, rate: float, names: tuple[str, ...]
) -> dict[str, Any]:
    """Check and time forward and backward.

    Args:
        row: the sizes.
        device: where to measure.
        budget: how long each is run.
        rate: operations per second of a large matrix product.
        names: keys of `LOSSES`.

    Returns:
        What JSON holds of the row: "losses" has, by name, "ms", the "share" of `rate` that its three products
        reach, and "peak_bytes" over the inputs; or "missing", why it has none. With "error" where linrec's is
        wrong.
    """
    result: dict[str, Any] = {"name": row.name, **dataclasses.asdict(row), "checked": CHECKED, "losses": {}}
    for name in names:
        release(device)
        try:
            loss = LOSSES[name]()
            if wrong := failure(partial(check, loss, row, device)):
                if name in (LINREC, COMPILED):
                    return result | {"error": f"{name}: {wrong}"}
                result["losses"][name] = {"missing": wrong}
                continue
            inputs = make(row, device)
            release(device)
            before = peak_bytes(device)
            both(loss, *inputs)
            peak = peak_bytes(device)
            time = measure(partial(both, loss, *inputs), device, budget)
            result["losses"][name] = {
                "ms": dataclasses.asdict(time),
                "share": row.operations / rate / time.median * 1e3,
                "peak_bytes": None if peak is None or before is None else peak - before,
            }
        except Exception as error:
            result["losses"][name] = {"missing": why(error)}
    return result
