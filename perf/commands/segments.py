"""`python -m perf segments`: training steps of models with a memory of segments."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from linrec.errors import unknown
from perf.commands.results import Options, RefusedError, about, check_profile, file_name, say, write
from perf.segments import BASE, PEER, QUICK, WAYS, measure_segments, variants
from perf.table import plain_table, show_profiles
from perf.training import Windows


@dataclass(frozen=True)
class SegmentsOptions(Options):
    """Training steps on a segment with the memory of the segment before, at Transformer-XL's base shape.

    Args:
        models: names of the models; "all" takes every model.
        peers: also measure x-transformers, with its memories, fused attention and rotary positions.
        profile: tell what the device spends its time on; CUDA alone.
        out: folder for DEVICE.json.
    """

    models: tuple[str, ...] = ("all",)
    peers: bool = False
    profile: bool = False
    out: Path = Path("results/segments")


def segments(options: SegmentsOptions, command: str) -> int:
    """Measure the models, eager and compiled, write the results, print them; return the exit status.

    Raises:
        RefusedError: a name that does not exist, or a profile of another device than CUDA.
    """
    check_profile(options.profile, options.device)
    shape, device = QUICK if options.quick else BASE, torch.device(options.device)
    known = list(variants(shape))
    for name in options.models:
        if name not in [*known, "all"]:
            raise RefusedError(unknown("model", name, [*known, "all"]))
    names = known if "all" in options.models else list(options.models)
    windows = Windows(2, 0.0) if options.quick else Windows()
    results: dict[str, Any] = {
        **about(device, command, [PEER] if options.peers else []),
        "protocol": {"shape": dataclasses.asdict(shape), "windows": dataclasses.asdict(windows)},
        "models": [],
    }
    path = options.out / f"{file_name(results)}.json"
    for name in [*names, *([PEER] if options.peers else [])]:
        for way in WAYS[:1] if options.quick else WAYS[: 3 if device.type == "cuda" else 2]:
            say(f"{name}, {way}")
            found = measure_segments(name, shape, device, windows, way, profile=options.profile)
            results["models"].append({"model": name, "way": way, **found})
            # what is measured is not lost when the rest is stopped
            write(path, results)
    show(Console(width=min(Console().width, 80)), results)
    print(f"\nwrote {path}")
    return int(any("missing" in found for found in results["models"]))


def show(console: Console, results: dict[str, Any]) -> None:
    """Print the speeds, then profiles, then what failed."""
    shape = results["protocol"]["shape"]
    console.print(
        f"\n{shape['n_layers']} layers, width {shape['d_model']}, {shape['batch']} segments of "
        f"{shape['segment']} tokens, memory of {shape['segment']}",
        highlight=False,
    )
    table = plain_table()
    table.add_column("model")
    for heading in ("", "parameters", "tokens/s", "ms/step", "GiB", "first s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for found in results["models"]:
        if "missing" in found:
            continue
        table.add_row(
            found["model"],
            found["way"],
            f"{found['parameters'] / 1e6:,.1f}M",
            f"{found['tokens_per_second']['median']:,.0f}",
            f"{found['step_ms']:.1f}",
            "" if found["peak_bytes"] is None else f"{found['peak_bytes'] / 2**30:.1f}",
            f"{found['first_seconds']:.1f}",
        )
    console.print(table)
    show_profiles(console, results["models"], "model", "way")
    for found in results["models"]:
        for part in (found, found.get("profile", {})):
            if "missing" in part:
                console.print(f"{found['model']}: {part['missing']}", markup=False, highlight=False)
