"""`python -m perf models`: training and inference of encoders against length."""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional

from linrec.lab.train import LoopConfig, OptimConfig
from linrec.lab.train.fabric import make_fabric, matmul_precision, seed_all
from linrec.lab.train.optim import make_optimizers
from linrec.lab.train.progress import Interrupt
from linrec.models import SequenceClassifier
from linrec.models.compilation import EAGER_STEPS, CapturedStep
from perf.encoders import BASELINE, ENCODERS, Encoder, Size
from perf.engine import Options, RefusedError, Report, attempt, bench_of, check_names, say
from perf.table import draw_panels, show_errors, show_table
from perf.timing import OUT_OF_MEMORY, Bench, Windows

Pass: TypeAlias = Literal["training", "inference"]
Way: TypeAlias = Literal["eager", "compiled"]
Step: TypeAlias = Callable[[Tensor, Tensor], None]

PASSES: tuple[Pass, ...] = ("training", "inference")
LENGTHS = (1024, 2048, 3072, 4096, 5120)
LONGER = (8192, 16384, 32768)
QUICK_LENGTHS = (24, 48)
QUICK_SIZE = Size(batch=2, n_layers=1, d_model=16, d_channel_mixing=32)


@dataclass(frozen=True)
class ModelsOptions(Options):
    """Speed of training and inference against length: encoders that differ in their mixers alone.

    HGRN's table 15: an encoder for Text of the Long Range Arena, steps per second at 1K to 5K bytes, "out of
    memory" where it is. Of eager and compiled, the faster one is shown.

    Args:
        models: names of the encoders, all by default; an unknown name lists them.
        lengths: lengths to measure, by default 1,024 to 5,120.
        longest: go on to 8,192, 16,384 and 32,768 steps.
        batch: sequences of a batch.
        ways: how the model runs: "eager", as Python launches it, or "compiled" by torch.compile, on CUDA
            replayed as a graph. By default both on CUDA, eager alone on the CPU.
        precision: bfloat16 autocast over float32 parameters, or float32 throughout.
        matmul_precision: torch's setting for float32 matrix products; "high" allows TensorFloat32.
        out: folder for DEVICE.json and DEVICE.png.
    """

    models: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()
    longest: bool = False
    batch: int | None = None
    ways: tuple[Way, ...] = ()
    precision: Literal["32-true", "bf16-mixed"] = "bf16-mixed"
    matmul_precision: Literal["highest", "high"] = "high"
    out: Path = Path("results/models")


@dataclass(frozen=True)
class Protocol:
    """How the encoders are measured: at these lengths, in precisions as `LoopConfig` has them."""

    size: Size
    lengths: tuple[int, ...]
    precision: Literal["32-true", "bf16-mixed"] = "bf16-mixed"
    matmul_precision: Literal["highest", "high"] = "high"
    windows: int = 5
    seconds: float = 1.0


def models(options: ModelsOptions, command: str) -> int:
    """Measure the encoders, write, print and draw the results; return the exit status.

    Each point is written as it is measured. An interrupt waits for the current point, and shows the results
    so far.
    """
    names = options.models or [encoder.name for encoder in ENCODERS]
    check_names("model", names, [encoder.name for encoder in ENCODERS])
    encoders = [encoder for encoder in ENCODERS if encoder.name in names]
    bench = bench_of(options, windows=Windows(seconds=0.1))
    protocol, ways = _protocol(options, bench.windows), options.ways
    if not ways:
        ways = ("eager", "compiled") if options.device == "cuda" else ("eager",)
    report = Report(
        options,
        command,
        protocol={**dataclasses.asdict(protocol), "ways": ways, "baseline": BASELINE},
        models=[
            {
                "name": encoder.name,
                "parameters": parameters(encoder, protocol.size),
                "config": dataclasses.asdict(encoder.config(protocol.size)),
            }
            for encoder in encoders
        ],
        points=[],
    )
    results = report.results
    start = time.perf_counter()
    with Interrupt() as interrupt:
        # all encoders in one way before the next: the results of an interrupted run can be compared
        for way, encoder, name in itertools.product(ways, encoders, PASSES):
            if interrupt.requested:
                break
            say(f"{encoder.name}, {name}, {way}")
            for point in measure_encoder(bench, encoder, name, way, protocol):
                results["best"] = best_points([*results["points"], point])
                results["seconds"] = time.perf_counter() - start
                report.add("points", point)
                if interrupt.requested:
                    say("no more: stopped")
                    break
    failed = any(best.get("missing", OUT_OF_MEMORY) != OUT_OF_MEMORY for best in results["best"])
    status = report.finish(show, failed=interrupt.requested or failed)
    print(f"wrote {draw(results, report.path.with_suffix('.png'))}")
    return status


def _protocol(options: ModelsOptions, windows: Windows) -> Protocol:
    lengths = options.lengths or (QUICK_LENGTHS if options.quick else LENGTHS)
    if options.longest:
        lengths += LONGER
    size = QUICK_SIZE if options.quick else Size()
    batch = size.batch if options.batch is None else options.batch
    for name, least in (("lengths", min(lengths)), ("batch", batch)):
        if least < 1:
            raise RefusedError(f"--{name} must be at least 1; got {least}.")
    return Protocol(
        dataclasses.replace(size, batch=batch),
        tuple(sorted(set(lengths))),
        options.precision,
        options.matmul_precision,
        **dataclasses.asdict(windows),
    )


def parameters(encoder: Encoder, size: Size) -> int:
    """Return the number of an encoder's parameters."""
    with torch.device("meta"):
        model = SequenceClassifier(encoder.config(size))
    return sum(parameter.numel() for parameter in model.parameters())


def measure_encoder(
    bench: Bench, encoder: Encoder, name: Pass, way: Way, protocol: Protocol
) -> Iterator[dict[str, Any]]:
    """Yield the point of each length: its numbers, or "missing"."""
    for length in protocol.lengths:
        # a model of its own, since torch takes minutes to compile code for any length; the code, the graph
        # and the memory of the last length go first
        torch.compiler.reset()
        bench.release()
        with matmul_precision(protocol.matmul_precision):
            found = attempt(functools.partial(_measured, bench, encoder, name, way, length, protocol))
        yield {"model": encoder.name, "pass": name, "way": way, "length": length, **found}


def _measured(
    bench: Bench, encoder: Encoder, name: Pass, way: Way, length: int, protocol: Protocol
) -> dict[str, Any]:
    size, device = protocol.size, bench.device
    tokens = torch.randint(size.vocab_size, (size.batch, length), device=device)
    classes = torch.randint(size.n_outputs, (size.batch,), device=device)
    step = STEPS[name](encoder, way, protocol, device)
    run = CapturedStep(step) if way == "compiled" and bench.on_cuda else step
    found = bench.steps(lambda: run(tokens, classes), warm=EAGER_STEPS)
    return {
        "first_seconds": found.first_seconds,
        "calls_per_second": dataclasses.asdict(found.rate),
        "peak_bytes": found.peak_bytes,
    }


class _Objective(nn.Module):
    """The model and its loss in one module, to be compiled as one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, classes: Tensor) -> Tensor:
        return functional.cross_entropy(self.model(tokens), classes)


def _loop(protocol: Protocol, device: torch.device) -> LoopConfig:
    return LoopConfig(
        batch_size=protocol.size.batch,
        precision=protocol.precision,
        device="cuda" if device.type == "cuda" else "cpu",
    )


def _training(encoder: Encoder, way: Way, protocol: Protocol, device: torch.device) -> Step:
    """Return forward, loss, backward and the optimizer's step."""
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
    """Return forward without gradients."""
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


STEPS: dict[Pass, Callable[[Encoder, Way, Protocol, torch.device], Step]] = {
    "training": _training,
    "inference": _inference,
}


def best_points(points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the faster way of every model, pass and length, and its ratio to the Transformer's or None."""
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    for point in points:
        best = {name: point[name] for name in ("model", "pass", "length")}
        if "missing" in point:
            best["missing"] = point["missing"]
        else:
            rate = point["calls_per_second"]["median"]
            best |= {"way": point["way"], "steps_per_second": rate, "peak_bytes": point["peak_bytes"]}
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


def length_name(length: int) -> str:
    """Return a length as the paper's table heads it, such as "5K"."""
    return f"{length // 1024}K" if length % 1024 == 0 else str(length)


def show(console: Console, results: dict[str, Any]) -> None:
    """Print steps per second, their ratios, memory, and the reasons of missing points."""
    protocol, models, best = results["protocol"], results["models"], results["best"]
    size, lengths = protocol["size"], protocol["lengths"]
    names = [model["name"] for model in models]
    counted = ", ".join(f"{model['name']} {model['parameters'] / 1e6:.2f}M" for model in models)
    console.print(
        f"\n{size['n_layers']} layers of width {size['d_model']}, batch {size['batch']}, "
        f"{protocol['precision']}; parameters: {counted}",
        highlight=False,
    )

    def show_pass(title: str, wanted: str, cell: Callable[[dict[str, Any]], str]) -> None:
        found = {(e["model"], e["length"]): e for e in best if e["pass"] == wanted}

        def text(entry: dict[str, Any] | None) -> str:
            if entry is None:
                return ""
            if "missing" in entry:
                return OUT_OF_MEMORY if entry["missing"] == OUT_OF_MEMORY else "failed"
            return cell(entry)

        lines = [[name, *(text(found.get((name, length))) for length in lengths)] for name in names]
        # "out of memory" takes two lines
        show_table(console, title, ["", *map(length_name, lengths)], lines, width=len("memory"))

    for wanted in PASSES:
        show_pass(f"{wanted}, steps per second", wanted, lambda e: _three(e["steps_per_second"]))
    if BASELINE in names and len(names) > 1:
        for wanted in PASSES:
            title = f"{wanted}, times as fast as the {BASELINE}"
            show_pass(title, wanted, lambda e: "" if e["ratio"] is None else f"{e['ratio']:.2f}")
    if any(entry.get("peak_bytes") is not None for entry in best):
        show_pass("training, peak memory in GiB", PASSES[0], lambda e: _three(e["peak_bytes"] / 2**30))
    failed = []
    for point in results["points"]:
        if point.get("missing", OUT_OF_MEMORY) != OUT_OF_MEMORY:
            name = f"{point['model']}, {point['pass']}, {point['way']}, {length_name(point['length'])}"
            failed.append({"name": name, "error": point["missing"]})
    show_errors(console, failed)


def _three(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def draw(results: dict[str, Any], path: Path) -> Path:
    """Draw steps per second against length, training on the left; a line ends where memory was too little."""
    # imported here: matplotlib is needed for the picture alone
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    lengths = results["protocol"]["lengths"]
    best = [entry for entry in results["best"] if "missing" not in entry]

    def curve(wanted: str, name: str) -> tuple[list[float], list[float]]:
        mine = [entry for entry in best if (entry["model"], entry["pass"]) == (name, wanted)]
        return [entry["length"] for entry in mine], [entry["steps_per_second"] for entry in mine]

    def finish(axes: Any, wanted: str) -> None:
        if all(entry["pass"] != wanted for entry in best):
            # an axis of logarithms needs a number
            axes.set_xlim(lengths[0], lengths[-1])
            axes.set_ylim(1, 10)
        # a power law is a straight line
        axes.set_yscale("log")
        shown = lengths if len(lengths) <= 5 else [n for n in lengths if n & (n - 1) == 0]
        axes.set_xticks(shown, [length_name(n) for n in shown])
        low, high = axes.get_ylim()
        # one label for each decade is too few for one or two of them
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 300 * low else (1.0,)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:g}"))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_formatter(NullFormatter())

    names = [model["name"] for model in results["models"]]
    return draw_panels(path, PASSES, names, curve, y="steps per second", finish=finish)
