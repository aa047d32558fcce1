"""`python -m perf models`: speed of training and inference of encoders against length."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from linrec.lab.train import LoopConfig, OptimConfig
from linrec.models import SequenceClassifier, SequenceClassifierConfig
from linrec.models.compilation import EAGER_STEPS, CapturedStep
from perf.command import Command, RefusedError, check_names
from perf.engine import Record, attempt
from perf.sizes import MIXER_ARGUMENTS
from perf.table import Part, draw_panels, grid
from perf.timing import OUT_OF_MEMORY, Bench, Windows
from perf.training import as_training, make_objective, make_step, number_of_parameters

Way: TypeAlias = Literal["eager", "compiled"]

TRAINING, INFERENCE = PASSES = ("training", "inference")
LENGTHS = (1024, 2048, 3072, 4096, 5120)
LONGER = (8192, 16384, 32768)
BASELINE = "Transformer"


# HGRN's for Text of the Long Range Arena: bytes, two classes, and layers, width, batch and dropout of the
# authors' scripts. Their unit has SiLU; the scripts leave its width to a default, here the width of their
# language models, twice `d_model`
BATCH, QUICK_BATCH = 32, 2
SHAPE = SequenceClassifierConfig(
    vocab_size=256,
    n_outputs=2,
    n_layers=4,
    d_model=128,
    channel_mixing="swiglu",
    d_channel_mixing=256,
    dropout=0.1,
)
QUICK_SHAPE = dataclasses.replace(SHAPE, n_layers=1, d_model=16, d_channel_mixing=32)
# fields of the configuration: the encoders are equal but for these
ENCODERS: Mapping[str, Mapping[str, Any]] = {
    BASELINE: {"mixer": "attention", "bidirectional": False, "mixer_args": {"causal": False}},
    # the directions share all but the phase, as in the authors' code
    "HGRN": {"mixer": "hgru", "unshared": ("theta",)},
    "GateLoop": {"mixer": "gate_loop", "mixer_args": dict(MIXER_ARGUMENTS["gate_loop"])},
    "LRU": {"mixer": "lru"},
}


def config_of(name: str, shape: SequenceClassifierConfig) -> SequenceClassifierConfig:
    """Return the configuration of an encoder at the shape."""
    return dataclasses.replace(shape, **ENCODERS[name])


@dataclass(frozen=True)
class Point:
    """The name of an encoder, its pass, the way to run the encoder, and the length of the input."""

    model: str
    one: str
    way: Way
    length: int


@dataclass(frozen=True)
class Models(Command):
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
    """

    models: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()
    longest: bool = False
    batch: int | None = None
    ways: tuple[Way, ...] = ()
    precision: Literal["32-true", "bf16-mixed"] = "bf16-mixed"
    matmul_precision: Literal["highest", "high"] = "high"

    key = "points"
    windows = Windows(seconds=0.1)

    @property
    def shape(self) -> SequenceClassifierConfig:
        return QUICK_SHAPE if self.quick else SHAPE

    @property
    def sequences(self) -> int:
        """Sequences of a batch."""
        return (QUICK_BATCH if self.quick else BATCH) if self.batch is None else self.batch

    @property
    def axes(self) -> tuple[Sequence[Way], Sequence[str], Sequence[int]]:
        """The ways, the encoders and the lengths of the options."""
        ways: Sequence[Way] = self.ways or (("eager", "compiled") if self.device == "cuda" else ("eager",))
        encoders = [name for name in ENCODERS if name in (self.models or ENCODERS)]
        lengths = self.lengths or ((24, 48) if self.quick else LENGTHS)
        return ways, encoders, sorted({*lengths, *(LONGER if self.longest else ())})

    def chosen(self) -> Mapping[str, Point]:
        check_names("model", self.models, ENCODERS)
        ways, encoders, lengths = self.axes
        for name, least in (("lengths", min(lengths)), ("batch", self.sequences)):
            if least < 1:
                raise RefusedError(f"--{name} must be at least 1; got {least}.")
        # all encoders in one way before the next: the results of an interrupted run can be compared
        places = itertools.product(ways, encoders, PASSES, lengths)
        points = [Point(model, one, way, length) for way, model, one, length in places]
        return {f"{p.model}, {p.one}, {p.way}, {length_name(p.length)}": p for p in points}

    def about(self, bench: Bench) -> tuple[Bench, Record]:
        ways, encoders, lengths = self.axes
        sizes = ("n_layers", "d_model", "d_channel_mixing", "dropout", "vocab_size", "n_outputs")
        protocol = {
            "size": {"batch": self.sequences, **{name: getattr(self.shape, name) for name in sizes}},
            "lengths": lengths,
            "precision": self.precision,
            "matmul_precision": self.matmul_precision,
            **bench.windows._asdict(),
            "ways": ways,
            "baseline": BASELINE,
        }
        models = []
        for name in encoders:
            config = config_of(name, self.shape)
            with torch.device("meta"):
                parameters = number_of_parameters(SequenceClassifier(config))
            models.append({"name": name, "parameters": parameters, "config": dataclasses.asdict(config)})
        return bench, {"protocol": protocol, "models": models}

    def measure(self, bench: Bench, row: Point) -> Record:
        # the code, the graph and the memory of the last length go first: a model is compiled for each length,
        # since torch takes minutes to compile code for any length
        torch.compiler.reset()
        bench.release()
        place = {"model": row.model, "pass": row.one, "way": row.way, "length": row.length}
        return place | attempt(partial(self.measured, bench, row))

    def measured(self, bench: Bench, row: Point) -> Record:
        config, batch, device = config_of(row.model, self.shape), self.sequences, bench.device
        assert config.vocab_size is not None
        tokens = torch.randint(config.vocab_size, (batch, row.length), device=device)
        classes = torch.randint(config.n_outputs, (batch,), device=device)
        loop = LoopConfig(
            batch_size=batch,
            precision=self.precision,
            matmul_precision=self.matmul_precision,
            deterministic=False,
            compile="on" if row.way == "compiled" else "off",
            device=self.device,
        )
        with as_training(loop):
            step = step_of(config, row.one, loop)
            found = bench.steps(lambda: step(tokens, classes), warm=EAGER_STEPS)
        return {
            "first_seconds": found.first_seconds,
            "calls_per_second": found.rate._asdict(),
            "peak_bytes": found.peak_bytes,
        }

    @staticmethod
    def show(results: Record) -> Iterator[Part]:
        protocol, models = results["protocol"], results["models"]
        size, lengths = protocol["size"], protocol["lengths"]
        names = [model["name"] for model in models]
        counted = ", ".join(f"{model['name']} {model['parameters'] / 1e6:.2f}M" for model in models)
        yield (
            f"\n{size['n_layers']} layers of width {size['d_model']}, batch {size['batch']}, "
            f"{protocol['precision']}; parameters: {counted}"
        )
        best = best_points(results["points"])
        headings = [length_name(length) for length in lengths]

        def table(title: str, one: str, text: Callable[[Record], str]) -> Part:
            def cell(point: Record) -> str:
                if "missing" in point:
                    return OUT_OF_MEMORY if point["missing"] == OUT_OF_MEMORY else "failed"
                return text(point) if point else ""

            lines = {name: [cell(best.get((name, one, n), {})) for n in lengths] for name in names}
            # "out of memory" takes two lines
            return grid(title, headings, lines, width=len("memory"))

        def ratio(point: Record) -> str:
            baseline = best.get((BASELINE, point["pass"], point["length"]), {})
            return f"{speed(point) / speed(baseline):.2f}" if "calls_per_second" in baseline else ""

        for one in PASSES:
            yield table(f"{one}, steps per second", one, lambda point: three_digits(speed(point)))
        if BASELINE in names and len(names) > 1:
            for one in PASSES:
                yield table(f"{one}, times as fast as the {BASELINE}", one, ratio)
        if any(point.get("peak_bytes") is not None for point in best.values()):
            title = "training, peak memory in GiB"
            yield table(title, TRAINING, lambda point: three_digits(point["peak_bytes"] / 2**30))
        for point in results["points"]:
            if point.get("missing", OUT_OF_MEMORY) != OUT_OF_MEMORY:
                place = [point["model"], point["pass"], point["way"], length_name(point["length"])]
                yield f"{', '.join(place)}: {point['missing']}"

    def draw(self, results: Record, path: Path) -> Path:
        return draw_points(results, path)


def step_of(config: SequenceClassifierConfig, one: str, loop: LoopConfig) -> Callable[[Tensor, Tensor], None]:
    """Return a training step of `linrec train`, or a forward pass without gradients."""
    make = partial(SequenceClassifier, config)
    if one == TRAINING:
        _, step = make_step(make, OptimConfig(lr=1e-4), loop)
        return step
    fabric, model, _ = make_objective(make, loop)
    model.eval()

    @torch.no_grad()
    def infer(tokens: Tensor, classes: Tensor) -> None:
        with fabric.autocast():
            model(tokens)

    return CapturedStep(infer) if loop.compile == "on" and loop.device == "cuda" else infer


def best_points(points: Sequence[Record]) -> dict[tuple[str, str, int], Record]:
    """Return the faster way of every model, pass and length; a failure is told before too little memory."""

    def rank(point: Record) -> float:
        if "missing" in point:
            return -2 if point["missing"] == OUT_OF_MEMORY else -1
        return speed(point)

    found: dict[tuple[str, str, int], Record] = {}
    for point in points:
        place = (point["model"], point["pass"], point["length"])
        if place not in found or rank(point) > rank(found[place]):
            found[place] = point
    return found


def speed(point: Record) -> float:
    median: float = point["calls_per_second"]["median"]
    return median


def length_name(length: int) -> str:
    """Return a length as the paper's table heads it, such as "5K"."""
    return f"{length // 1024}K" if length % 1024 == 0 else str(length)


def three_digits(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def draw_points(results: Record, path: Path) -> Path:
    """Draw steps per second against length, training on the left; a line ends where memory was too little."""
    # imported here: matplotlib is needed for the picture alone
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    lengths = results["protocol"]["lengths"]
    best = [point for point in best_points(results["points"]).values() if "missing" not in point]

    def curve(wanted: str, name: str) -> list[tuple[int, float]]:
        mine = [point for point in best if (point["model"], point["pass"]) == (name, wanted)]
        return [(point["length"], speed(point)) for point in mine]

    def finish(axes: Any, wanted: str) -> None:
        if all(point["pass"] != wanted for point in best):
            # an axis of logarithms needs a number
            axes.set_xlim(lengths[0], lengths[-1])
            axes.set_ylim(1, 10)
        shown = lengths if len(lengths) <= 5 else [n for n in lengths if n & (n - 1) == 0]
        axes.set_xticks(shown, [length_name(n) for n in shown])
        low, high = axes.get_ylim()
        # one label for each decade is too few for one or two of them
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 300 * low else (1.0,)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:g}"))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_formatter(NullFormatter())

    names = [model["name"] for model in results["models"]]
    return draw_panels(path, PASSES, names, curve, finish, y="steps per second")
