"""What the commands have in common: what a result says about itself, and where it goes."""

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from linrec.lab.train.records import provenance
from perf.rows import R, select

Device: TypeAlias = Literal["cuda", "cpu"]
HERE: Device = "cuda" if torch.cuda.is_available() else "cpu"
"""Where a command measures when nobody says."""


@dataclass(frozen=True)
class Options:
    """The options of every command that measures on a device.

    Args:
        device: where to measure; by default on CUDA where there is one.
        quick: tiny sizes and few repetitions, to see that all of it runs; the numbers mean nothing.
    """

    device: Device = HERE
    quick: bool = False


class RefusedError(Exception):
    """What the user asks for does not exist or does not fit together; the message says what to do."""


def check_profile(profile: bool, device: Device) -> None:
    """Raise RefusedError if a profile is asked for of another device than CUDA."""
    if profile and device != "cuda":
        raise RefusedError("--profile is for CUDA; leave it out, or pass --device cuda.")


def about(device: torch.device, command: str, packages: Sequence[str] = ()) -> dict[str, Any]:
    """Return command, commit, versions and device; with the versions of further packages, if installed."""
    found = provenance(device)
    for package in packages:
        try:
            found["versions"][package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {"command": command, **found}


def file_name(results: dict[str, Any]) -> str:
    """Return the name of the results' device, as a file has it.

    Example:
        >>> file_name({"device": {"name": "NVIDIA H200"}})
        'nvidia-h200'
    """
    return re.sub("[^a-z0-9]+", "-", results["device"]["name"].lower()).strip("-")


def write(path: Path, results: dict[str, Any]) -> None:
    """Write results as JSON; the folder is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=2) + "\n")


def rows_named(names: Sequence[str], rows: Sequence[R]) -> list[R]:
    """Return the rows of these names, all if there are none.

    Raises:
        RefusedError: a name that does not exist.
    """
    try:
        return select(names, rows, ())[0]
    except ValueError as error:
        raise RefusedError(error) from error


def measure_rows(
    rows: Sequence[R], measure: Callable[[R], dict[str, Any]], results: dict[str, Any], path: Path
) -> None:
    """Measure row after row into `results["rows"]`, and write the results after each."""
    for row in rows:
        say(row.name)
        results["rows"].append(measure(row))
        # what is measured is not lost when the rest is stopped
        write(path, results)
        if results["device"]["type"] == "cuda":
            torch.cuda.empty_cache()


def say(what: str) -> None:
    """Tell what is being measured, beside the results."""
    print(f"measuring {what}", file=sys.stderr, flush=True)
