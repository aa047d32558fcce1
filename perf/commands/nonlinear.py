"""`python -m perf nonlinear`: nonlinear recurrences, step by step and by Newton's method."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from perf.commands.results import Options, about, file_name, measure_rows, rows_named
from perf.nonlinear import NAMES, measure_nonlinear, nonlinear_rows_of
from perf.rows import PASSES
from perf.table import SHORT, plain_table
from perf.timing import Budget


@dataclass(frozen=True)
class NonlinearOptions(Options):
    """Speed of nonlinear_scan's loops and of Newton's method beside torch's recurrent layers.

    Args:
        rows: names of the rows; none is all rows.
        out: folder for DEVICE.json.
    """

    rows: tuple[str, ...] = ()
    out: Path = Path("results/nonlinear")


def nonlinear(options: NonlinearOptions, command: str) -> int:
    """Measure the rows, write and print the results; return the exit status.

    Raises:
        RefusedError: a name that does not exist.
    """
    # most calls take longer than any budget
    device, budget = torch.device(options.device), Budget(1, 5) if options.quick else Budget(10, 40)
    rows = rows_named(options.rows, nonlinear_rows_of(options.device, quick=options.quick))
    results: dict[str, Any] = {**about(device, command), "rows": []}
    path = options.out / f"{file_name(results)}.json"
    measure_rows(rows, lambda row: measure_nonlinear(row, device, budget), results, path)
    show(Console(width=min(Console().width, 80)), results)
    print(f"\nwrote {path}")
    return int(any("error" in row for row in results["rows"]))


def show(console: Console, results: dict[str, Any]) -> None:
    """Print the times and their ratios to the loop, then iterations, then the errors."""
    rows = [row for row in results["rows"] if "passes" in row]
    console.print("\nmilliseconds of a call, microseconds of a step; times as fast as the loop")
    times = plain_table()
    for heading in ("row", "pass", "", "ms", "us/step", "x"):
        times.add_column(heading, justify="right" if heading in ("ms", "us/step", "x") else "left")
    for row in rows:
        for one in PASSES:
            for name in NAMES:
                times.add_row(row["name"], SHORT[one], name, *_cells(row["passes"][one][name]))
    console.print(times)
    console.print("\niterations of Newton's modes, by the gain of the recurrent weights")
    counts = plain_table()
    for heading in ("row", "mode", "gain", "iterations", "residual"):
        counts.add_column(heading, justify="right" if heading in ("iterations", "residual") else "left")
    for row in rows:
        for mode, gains in row["iterations"].items():
            for gain, entry in gains.items():
                found = [entry["missing"]] if "missing" in entry else _counted(entry)
                counts.add_row(row["name"], mode, gain, *found)
    console.print(counts)
    for row in results["rows"]:
        if "error" in row:
            console.print(f"{row['name']}: {row['error']}", markup=False, highlight=False)


def _cells(entry: dict[str, Any]) -> list[str]:
    """Return the cells of a measurement: its time, time per step and ratio, or why it is missing."""
    if "missing" in entry:
        return [entry["missing"]]
    ratio = f"{entry['ratio']:.1f}" if "ratio" in entry else "-"
    return [f"{entry['ms']['median']:.3f}", f"{entry['us_per_step']:.1f}", ratio]


def _counted(entry: dict[str, Any]) -> list[str]:
    return [str(entry["iterations"]), f"{entry['residual']:.2g}"]
