"""`python -m perf models`: encoders against length."""

import dataclasses
import itertools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console

from linrec.errors import unknown
from linrec.lab.train.progress import Interrupt
from perf.commands.results import Options, RefusedError, about, file_name, say, write
from perf.encoders import BASELINE, ENCODERS, Encoder, Size
from perf.memory import OUT_OF_MEMORY
from perf.models import PASSES, Protocol, Way, best_points, measure_encoder, parameters
from perf.models_report import draw, show

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
        models: names of the encoders, all by default; a name that does not exist lists them.
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


def models(options: ModelsOptions, command: str) -> int:
    """Measure the encoders, write the results, print and draw them; return the exit status.

    Each point is written as it is measured; an interrupt waits for the present one, and shows what there is.

    Raises:
        RefusedError: options that do not fit together, or a name that does not exist.
    """
    encoders, protocol = _encoders(options), _protocol(options)
    device = torch.device(options.device)
    ways: tuple[Way, ...] = options.ways or (("eager", "compiled") if device.type == "cuda" else ("eager",))
    results = {
        **about(device, command),
        "protocol": {**dataclasses.asdict(protocol), "ways": ways, "baseline": BASELINE},
        "models": [
            {
                "name": encoder.name,
                "parameters": parameters(encoder, protocol.size),
                "config": dataclasses.asdict(encoder.config(protocol.size)),
            }
            for encoder in encoders
        ],
        "points": [],
    }
    path = options.out / f"{file_name(results)}.json"
    start = time.perf_counter()
    with Interrupt() as interrupt:
        # all encoders in one way before the next: what a stopped run has can be compared
        for way, encoder, name in itertools.product(ways, encoders, PASSES):
            if interrupt.requested:
                break
            say(f"{encoder.name}, {name}, {way}")
            for point in measure_encoder(encoder, name, way, protocol, device):
                results["points"].append(point)
                results["best"] = best_points(results["points"])
                results["seconds"] = time.perf_counter() - start
                write(path, results)
                if interrupt.requested:
                    say("no more: stopped")
                    break
    show(Console(width=min(Console().width, 80)), results)
    print(f"\nwrote {path}\nwrote {draw(results, path.with_suffix('.png'))}")
    failed = any(best.get("missing", OUT_OF_MEMORY) != OUT_OF_MEMORY for best in results["best"])
    return int(interrupt.requested or failed)


def _encoders(options: ModelsOptions) -> list[Encoder]:
    names = [encoder.name for encoder in ENCODERS]
    for name in options.models:
        if name not in names:
            raise RefusedError(unknown("model", name, names))
    return [encoder for encoder in ENCODERS if encoder.name in (options.models or names)]


def _protocol(options: ModelsOptions) -> Protocol:
    lengths = options.lengths or (QUICK_LENGTHS if options.quick else LENGTHS)
    if options.longest:
        lengths += tuple(length for length in LONGER if length not in lengths)
    if min(lengths) < 1:
        raise RefusedError(f"--lengths must be at least 1; got {min(lengths)}.")
    size = QUICK_SIZE if options.quick else Size()
    if options.batch is not None:
        if options.batch < 1:
            raise RefusedError(f"--batch must be at least 1; got {options.batch}.")
        size = dataclasses.replace(size, batch=options.batch)
    protocol = Protocol(size, tuple(sorted(set(lengths))), options.precision, options.matmul_precision)
    return dataclasses.replace(protocol, windows=2, seconds=0.0) if options.quick else protocol
