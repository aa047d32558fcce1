"""Measures training and inference of the encoders against length."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from linrec.lab.train import LoopConfig, OptimConfig
from linrec.lab.train.fabric import make_fabric, matmul_precision, seed_all
from linrec.lab.train.optim import make_optimizers
from linrec.lab.train.step import EAGER_STEPS, CapturedStep
from linrec.models import SequenceClassifier
from perf.encoders import BASELINE, Encoder, Size
from perf.memory import OUT_OF_MEMORY, peak_bytes, release, why
from perf.timing import calls_per_second

Pass: TypeAlias = Literal["training", "inference"]
Way: TypeAlias = Literal["eager", "compiled"]
Step: TypeAlias = Callable[[Tensor, Tensor], None]

PASSES: tuple[Pass, ...] = ("training", "inference")


@dataclass(frozen=True)
class Protocol:
    """How the encoders are measured.

    Args:
        size: their shape.
        lengths: steps of a sequence.
        precision: as in `LoopConfig`.
        matmul_precision: as in `LoopConfig`.
        windows: windows that calls are counted in; the median is the result.
        seconds: how long a window should be.
    """

    size: Size
    lengths: tuple[int, ...]
    precision: Literal["32-true", "bf16-mixed"] = "bf16-mixed"
    matmul_precision: Literal["highest", "high"] = "high"
    windows: int = 5
    seconds: float = 0.1


def parameters(encoder: Encoder, size: Size) -> int:
    """Return the number of an encoder's parameters."""
    with torch.device("meta"):
        model = SequenceClassifier(encoder.config(size))
    return sum(parameter.numel() for parameter in model.parameters())


def measure_encoder(
    encoder: Encoder, name: Pass, way: Way, protocol: Protocol, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Yield what JSON holds of each length.

    Each length has a model of its own, compiled for it: code for any length takes torch minutes to make.

    Yields:
        "model", "pass", "way", "length", "first_seconds", "calls_per_second" and "peak_bytes"; or "missing",
        why there are none.
    """
    point = {"model": encoder.name, "pass": name, "way": way}
    with matmul_precision(protocol.matmul_precision):
        for length in protocol.lengths:
            # the last length's code and graph, and its memory, go before the next one's come
            torch.compiler.reset()
            release(device)
            make = functools.partial(_STEPS[name], encoder, way, protocol, device)
            yield {**point, "length": length, **_point(make, way, length, protocol, device)}


def best_points(points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the faster way of every model, pass and length, and its ratio to the Transformer's.

    Returns:
        "model", "pass", "length", "way", "steps_per_second", "peak_bytes" and "ratio", which is None where
        there is none to compare with; or "missing". Where no way worked, and not for the same reason, the one
        that is not memory is told.
    """
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    for point in points:
        place = {name: point[name] for name in ("model", "pass", "length")}
        if "missing" in point:
            best = {**place, "missing": point["missing"]}
        else:
            rate = point["calls_per_second"]["median"]
            best = {**place, "way": point["way"], "steps_per_second": rate, "peak_bytes": point["peak_bytes"]}
        key = (point["model"], point["pass"], point["length"])
        if key not in found or _rank(best) > _rank(found[key]):
            found[key] = best
    for (_, name, length), best in found.items():
        if "missing" not in best:
            baseline = found.get((BASELINE, name, length), {}).get("steps_per_second")
            best["ratio"] = None if baseline is None else best["steps_per_second"] / baseline
    return list(found.values())


def _rank(best: dict[str, Any]) -> float:
    if "missing" in best:
        return -2 if best["missing"] == OUT_OF_MEMORY else -1
    return best["steps_per_second"]


class _Objective(nn.Module):
    """The model and its loss in one module, so that they are compiled as one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, classes: Tensor) -> Tensor:
        return functional.cross_entropy(self.model(tokens), classes)


def _training(encoder: Encoder, way: Way, protocol: Protocol, device: torch.device) -> Step:
    """Forward, loss, backward, optimiser."""
    fabric = make_fabric(_loop(protocol, device))
    seed_all(0)
    model = SequenceClassifier(encoder.config(protocol.size))
    objective: Any = _Objective(model)
    if way == "compiled":
        objective.compile(dynamic=False)
    objective = fabric.setup_module(objective)
    optimizers: Any = [fabric.setup_optimizers(x) for x in make_optimizers(model, OptimConfig(lr=1e-4))]

    def step(tokens: Tensor, classes: Tensor) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        fabric.backward(objective(tokens, classes))
        for optimizer in optimizers:
            optimizer.step()

    return step


def _inference(encoder: Encoder, way: Way, protocol: Protocol, device: torch.device) -> Step:
    """Forward without gradients."""
    fabric = make_fabric(_loop(protocol, device))
    seed_all(0)
    model: Any = SequenceClassifier(encoder.config(protocol.size)).eval()
    if way == "compiled":
        model.compile(dynamic=False)
    model = fabric.setup_module(model)

    @torch.no_grad()
    def step(tokens: Tensor, classes: Tensor) -> None:
        model(tokens)

    return step


_STEPS: dict[Pass, Callable[[Encoder, Way, Protocol, torch.device], Step]] = {
    "training": _training,
    "inference": _inference,
}


def _loop(protocol: Protocol, device: torch.device) -> LoopConfig:
    return LoopConfig(
        batch_size=protocol.size.batch,
        precision=protocol.precision,
        device="cuda" if device.type == "cuda" else "cpu",
    )


def _point(
    make: Callable[[], Step], way: Way, length: int, protocol: Protocol, device: torch.device
) -> dict[str, Any]:
    size = protocol.size
    try:
        tokens = torch.randint(size.vocab_size, (size.batch, length), device=device)
        classes = torch.randint(size.n_outputs, (size.batch,), device=device)
        step = make()
        replays = way == "compiled" and device.type == "cuda"
        run = CapturedStep(step) if replays else step

        def call() -> None:
            run(tokens, classes)

        start = time.perf_counter()
        call()
        first = time.perf_counter() - start
        # of the computation, not of what compiled it
        release(device)
        for _ in range(EAGER_STEPS):
            call()
        rate = calls_per_second(call, device, windows=protocol.windows, seconds=protocol.seconds)
    except Exception as error:
        return {"missing": why(error)}
    return {
        "first_seconds": first,
        "calls_per_second": dataclasses.asdict(rate),
        "peak_bytes": peak_bytes(device),
    }
