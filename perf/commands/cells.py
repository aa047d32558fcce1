"""`python -m perf cells`: training steps of layers of nonlinear cells."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from linrec import mixers
from linrec.ops.nonlinear_scan import OPERATOR, UNROLLED
from perf.cells import RECIPE, TOO_LONG, cell_rows_of, measure_cell
from perf.commands.results import Options, RefusedError, about, file_name, measure_rows
from perf.memory import OUT_OF_MEMORY
from perf.table import plain_table
from perf.training import Windows


@dataclass(frozen=True)
class CellsOptions(Options):
    """Training steps of one layer of a nonlinear cell, as `linrec train adding` makes them, by its gradient.

    Args:
        models: names of mixers on `nonlinear_scan`.
        lengths: steps of a sequence; by default 1,000, and on CUDA also 4,000 and 17,984.
        out: folder for DEVICE.json.
    """

    models: tuple[str, ...] = ("lem", "cornn", "unicornn")
    lengths: tuple[int, ...] = ()
    out: Path = Path("results/cells")


def cells(options: CellsOptions, command: str) -> int:
    """Measure the layers, write the results, print them; return the exit status.

    Raises:
        RefusedError: a mixer that does not exist or is no nonlinear cell, or a length that is too short.
    """
    for name in options.models:
        _check_model(name)
    if any(length <= UNROLLED for length in options.lengths):
        raise RefusedError(
            f"--lengths must be above {UNROLLED}, up to which torch.compile unrolls loops; "
            f"got {min(options.lengths)}."
        )
    device = torch.device(options.device)
    rows = cell_rows_of(options.models, options.lengths, options.device, quick=options.quick)
    windows = Windows(2, 0.0) if options.quick else Windows(3, 0.5)
    results: dict[str, Any] = {
        **about(device, command),
        "protocol": {
            "recipe": RECIPE.name,
            "precision": RECIPE.loop.precision,
            "matmul_precision": RECIPE.loop.matmul_precision,
            "windows": dataclasses.asdict(windows),
        },
        "rows": [],
    }
    path = options.out / f"{file_name(results)}.json"
    measure_rows(rows, lambda row: measure_cell(row, device, windows), results, path)
    show(Console(width=min(Console().width, 80)), results["rows"])
    print(f"\nwrote {path}")
    return int(any(row.get("missing", TOO_LONG) not in (TOO_LONG, OUT_OF_MEMORY) for row in results["rows"]))


def _check_model(name: str) -> None:
    try:
        recurrence = mixers.get(name).recurrence
    except ValueError as error:
        raise RefusedError(error) from error
    if recurrence != OPERATOR.name:
        raise RefusedError(
            f"--models takes mixers on `{OPERATOR.name}`, such as lem; got {name!r}, a mixer without it."
        )


def show(console: Console, rows: list[dict[str, Any]]) -> None:
    """Print the speeds and the memory, then what is missing."""
    console.print("\ntraining steps per second; time and memory of a step of a sequence", highlight=False)
    table = plain_table()
    table.add_column("row", no_wrap=True)
    for heading in ("steps/s", "us/step", "GiB", "KiB/step", "first s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        if "missing" not in row:
            table.add_row(
                row["name"],
                f"{row['steps_per_second']['median']:.3g}",
                f"{row['us_per_step']:.1f}",
                "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.2f}",
                "" if row["bytes_per_step"] is None else f"{row['bytes_per_step'] / 2**10:.2f}",
                f"{row['first_seconds']:.1f}",
            )
    console.print(table)
    for row in rows:
        if "missing" in row:
            console.print(f"{row['name']}: {row['missing']}", markup=False, highlight=False)
