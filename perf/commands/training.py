"""`python -m perf training`: tokens per second of language models."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from linrec.lab.train import LoopConfig
from linrec.lab.train.fabric import matmul_precision
from linrec.models import ModelConfig
from linrec.models.pattern import spelled
from perf.commands.results import Options, RefusedError, about, check_profile, file_name, say, write
from perf.sizes import MODELS, QUICK, sized
from perf.timing import Budget, matmul_rate
from perf.training import (
    FLOPS,
    OPTIM,
    Windows,
    measure_fla,
    measure_forward,
    measure_training,
    model_config,
)
from perf.training_peers import FLA, PACKAGES
from perf.training_report import draw, show


@dataclass(frozen=True)
class TrainingOptions(Options):
    """Tokens per second of training language models, on random tokens: the step that `linrec train` makes.

    With `--models`, measurements are added to those of earlier calls, and a picture is drawn of all.

    Args:
        presets: models, by the names of `linrec.models.preset_names()`.
        mixers: mixers to put into each of them; by default the preset's own.
        models: in place of presets, models of one size that differ in their mixers alone, by the names of
            `perf.sizes.MODELS`; "all" takes every model.
        size: size of `models`, by the names of `perf.sizes.SIZES`.
        peers: also measure flash-linear-attention's model of the same size, where there is one.
        batch: sequences of a step.
        length: tokens of a sequence.
        document: tokens of a document, for packed ones with a reset between them; by default there is none.
        precision: bfloat16 autocast over float32 parameters, or float32 throughout.
        matmul_precision: torch's setting for float32 matrix products; "high", that of the recipes for text,
            allows TensorFloat32.
        deterministic: prefer algorithms that give the same bits each time; the recipes for text do not.
        accumulate: pieces that each batch is taken in.
        recompute: compute each block again in the backward pass.
        compile: compile the model, and on CUDA replay each step as one graph; "auto" does so on CUDA alone.
        profile: tell what the device spends its time on; CUDA alone.
        out: folder for DEVICE.json.
    """

    presets: tuple[str, ...] = ("wikitext103-hgrn",)
    mixers: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    size: str = "374M"
    peers: bool = False
    batch: int = 128
    length: int = 512
    document: int | None = None
    precision: Literal["32-true", "bf16-mixed"] = "bf16-mixed"
    matmul_precision: Literal["highest", "high"] = "high"
    deterministic: bool = False
    accumulate: int = 1
    recompute: bool = False
    compile: Literal["auto", "on", "off"] = "auto"
    profile: bool = False
    out: Path = Path("results/training")


def training(options: TrainingOptions, command: str) -> int:
    """Measure the models, write the results, print them; return the exit status.

    Raises:
        RefusedError: options that do not fit together, or a name that does not exist.
    """
    jobs, loop, length = _jobs(options), _loop(options), 16 if options.quick else options.length
    device = torch.device(options.device)
    windows = Windows(2, 0.0) if options.quick else Windows()
    results: dict[str, Any] = {
        **about(device, command, PACKAGES if options.peers else ()),
        "protocol": {
            "length": length,
            "document": options.document,
            "loop": dataclasses.asdict(loop),
            "optim": dataclasses.asdict(OPTIM),
            "flops": FLOPS,
            "fla": FLA,
        },
        "matmul": _matmul(options, device),
        "models": [],
    }
    shape = f"-{options.size}-{loop.batch_size}x{length}" if options.models else ""
    path = options.out / f"{file_name(results)}{shape}.json"
    known = _known(path, results) if options.models else {}
    source = {name: results[name] for name in ("command", "commit", "dirty")}
    source["windows"] = dataclasses.asdict(windows)
    for name, mixer, config in jobs:
        say(f"{name}, {mixer}")
        found = measure_training(
            config, loop, length, device, windows, document=options.document, profile=options.profile
        )
        if "missing" not in found:
            rate = found["tokens_per_second"]["median"] * found["flops_per_token"]
            found |= {"flops_per_second": rate, "share_of_matmul": rate / results["matmul"]["rate"]}
        entry = {"preset": name, "mixer": mixer, **source, "config": dataclasses.asdict(config), **found}
        # a peer stays when its model is measured again without it
        peer = known.get(mixer, {}).get("fla")
        if options.peers:
            say(f"{name}, {mixer}, flash-linear-attention")
            model, size = sized(mixer, name)
            peer = source | measure_fla(
                model, QUICK if options.quick else size, loop, length, device, windows
            )
        if peer is not None:
            entry["fla"] = peer
            if "forward" in peer:
                entry["forward"] = measure_forward(config, loop, length, device, windows)
        if options.models:
            known[mixer] = entry
            results["models"] = [known[mixer] for mixer in MODELS if mixer in known]
        else:
            results["models"].append(entry)
        # what is measured is not lost when the rest is stopped
        write(path, results)
    if options.models:
        print(f"\nwrote {draw(results, path.with_suffix('.png'))}")
    show(Console(width=min(Console().width, 80)), results)
    print(f"\nwrote {path}")
    return int(
        any("missing" in found for model in results["models"] for found in (model, model.get("profile", {})))
    )


def _known(path: Path, results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what earlier calls measured, by model.

    Raises:
        RefusedError: they measured in another way.
    """
    if not path.exists():
        return {}
    earlier = json.loads(path.read_text())
    for name in ("device", "protocol"):
        if earlier[name] != json.loads(json.dumps(results[name])):
            raise RefusedError(
                f"{path} holds measurements with another {name}; remove the file, or choose another --out."
            )
    return {entry["mixer"]: entry for entry in earlier["models"]}


def _jobs(options: TrainingOptions) -> list[tuple[str, str, ModelConfig]]:
    """Return preset or size, mixer or model, and configuration of every model to measure."""
    check_profile(options.profile, options.device)
    if options.models and options.mixers:
        raise RefusedError("--mixers is for presets; with --models, name the mixers there.")
    if options.peers and not options.models:
        raise RefusedError("--peers compares models of one size; name them by --models.")
    mixers: tuple[str | None, ...] = options.mixers or (None,)
    try:
        if options.models:
            names = [*MODELS] if options.models == ("all",) else options.models
            chosen = [(name, *sized(name, options.size)) for name in names]
            return [
                (options.size, name, model.config(QUICK if options.quick else size))
                for name, model, size in chosen
            ]
        configs = [
            (name, model_config(name, mixer, quick=options.quick))
            for name in options.presets
            for mixer in mixers
        ]
    except ValueError as error:
        raise RefusedError(error) from error
    return [(name, spelled(config.mixer_pattern), config) for name, config in configs]


def _loop(options: TrainingOptions) -> LoopConfig:
    for name in ("length", "document"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise RefusedError(f"--{name} must be at least 1; got {value}.")
    try:
        return LoopConfig(
            batch_size=2 if options.quick else options.batch,
            accumulate=options.accumulate,
            recompute=options.recompute,
            precision=options.precision,
            matmul_precision=options.matmul_precision,
            deterministic=options.deterministic,
            compile=options.compile,
            device=options.device,
        )
    except ValueError as error:
        raise RefusedError(error) from error


def _matmul(options: TrainingOptions, device: torch.device) -> dict[str, Any]:
    """The yardstick: a product of large matrices in the precision that most of the model's are in."""
    dtype = torch.bfloat16 if options.precision == "bf16-mixed" else torch.float32
    size = 64 if options.quick else 8192 if device.type == "cuda" else 1024
    budget = Budget(1, 5) if options.quick else Budget()
    with matmul_precision(options.matmul_precision):
        rate = matmul_rate(device, dtype, budget, size)
    return {"size": size, "dtype": str(dtype), "rate": rate}
