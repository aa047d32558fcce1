"""`python -m perf decoding`: tokens per second of generation."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from perf.commands.ops import budget_of, yardstick
from perf.commands.results import Options, RefusedError, about, check_profile, file_name, say, write
from perf.decoding import LIMIT, PRECISION, measure_decoding, measure_fla_decoding
from perf.sizes import MODELS, QUICK, sized
from perf.table import plain_table, show_profiles
from perf.training import Windows
from perf.training_peers import PACKAGES


@dataclass(frozen=True)
class DecodingOptions(Options):
    """Tokens per second of generating text with models of one size that differ in their mixers alone.

    Args:
        models: names of `perf.sizes.MODELS`; "all" takes every model.
        size: size of the models, by the names of `perf.sizes.SIZES`.
        batches: sequences that are generated at once, one measurement each.
        length: tokens of the prompt.
        compile: compile the steps; without, they are replayed as they are.
        peers: also measure `generate` of flash-linear-attention's model of the same size, where there is one.
        profile: tell what the device spends its time on; CUDA alone.
        out: folder for DEVICE-SIZE.json.
    """

    models: tuple[str, ...] = ("gla",)
    size: str = "374M"
    batches: tuple[int, ...] = (1, 64)
    length: int = 2048
    compile: bool = True
    peers: bool = False
    profile: bool = False
    out: Path = Path("results/decoding")


def decoding(options: DecodingOptions, command: str) -> int:
    """Measure the models, write the results, print them; return the exit status.

    Raises:
        RefusedError: a name that does not exist, or a number below 1.
    """
    if min(options.batches, default=1) < 1 or options.length < 1:
        raise RefusedError("--batches and --length must be at least 1.")
    check_profile(options.profile, options.device)
    names = [*MODELS] if options.models == ("all",) else options.models
    try:
        chosen = {name: sized(name, options.size) for name in names}
    except ValueError as error:
        raise RefusedError(error) from error
    device, length = torch.device(options.device), 4 if options.quick else options.length
    windows = Windows(2, 0.0) if options.quick else Windows(seconds=0.2)
    results: dict[str, Any] = {
        **about(device, command, PACKAGES if options.peers else ()),
        **yardstick(device, budget_of(quick=options.quick), quick=options.quick),
        "protocol": {
            "length": length,
            "precision": PRECISION,
            "compile": options.compile,
            "windows": dataclasses.asdict(windows),
            "limit": LIMIT,
        },
        "models": [],
    }
    path = options.out / f"{file_name(results)}-{options.size}.json"
    for name, (model, size) in chosen.items():
        config = model.config(QUICK if options.quick else size)
        for batch in options.batches:
            say(f"{name}, {batch}")
            found = measure_decoding(
                config, batch, length, device, windows, compile=options.compile, profile=options.profile
            )
            if "missing" not in found and "copy_rate" in results:
                found["share_of_limit"] = found["bytes"] / results["copy_rate"] / found["step_ms"] * 1e3
            if options.peers and model.fla is not None:
                found["fla"] = measure_fla_decoding(model, size, batch, length, device)
            results["models"].append({"model": name, "batch": batch, **found})
            # what is measured is not lost when the rest is stopped
            write(path, results)
    show(Console(width=min(Console().width, 80)), results)
    print(f"\nwrote {path}")
    return int(any("missing" in found for found in results["models"]))


def show(console: Console, results: dict[str, Any]) -> None:
    """Print the speeds, then what failed."""
    told = results["protocol"]
    console.print(
        f"\nprompts of {told['length']} tokens, {told['precision']}; % of the speed at which "
        "the fewest bytes of a step move at the rate of a copy",
        highlight=False,
    )
    table = plain_table()
    table.add_column("model")
    for heading in ("batch", "tokens/s", "ms/step", "%", "prompt tokens/s", "first s", "fla's"):
        table.add_column(heading, justify="right", no_wrap=True)
    for found in results["models"]:
        if "missing" in found:
            continue
        table.add_row(
            found["model"],
            str(found["batch"]),
            f"{found['tokens_per_second']['median']:,.0f}",
            f"{found['step_ms']:.3g}",
            f"{100 * found['share_of_limit']:.3g}" if "share_of_limit" in found else "",
            f"{found['prefill_tokens_per_second']:,.0f}",
            f"{found['first_seconds']:.1f}",
            f"{found['fla']['tokens_per_second']:,.0f}"
            if "tokens_per_second" in found.get("fla", {})
            else "",
        )
    console.print(table)
    show_profiles(console, results["models"], "model", "batch")
    for found in results["models"]:
        for of, part in (("", found), (", flash-linear-attention", found.get("fla", {}))):
            if "missing" in part:
                text = f"{found['model']}, {found['batch']}{of}: {part['missing']}"
                console.print(text, markup=False, highlight=False)
