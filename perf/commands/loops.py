"""`python -m perf loops`: the sLSTM's loop over time."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from perf.commands.ops import budget_of
from perf.commands.results import Options, about, file_name, measure_rows, rows_named
from perf.loops import NAMES, loop_rows_of, measure_loop
from perf.rows import PASSES
from perf.table import SHORT, plain_table


@dataclass(frozen=True)
class LoopsOptions(Options):
    """Speed of the sLSTM's kernel beside the loop in torch operations and torch's LSTM of the same width.

    Args:
        rows: names of the rows; none is all rows.
        out: folder for DEVICE.json.
    """

    rows: tuple[str, ...] = ()
    out: Path = Path("results/loops")


def loops(options: LoopsOptions, command: str) -> int:
    """Measure the rows, write and print the results; return the exit status.

    Raises:
        RefusedError: a name that does not exist.
    """
    device, budget = torch.device(options.device), budget_of(quick=options.quick)
    rows = rows_named(options.rows, loop_rows_of(options.device, quick=options.quick))
    results: dict[str, Any] = {**about(device, command), "rows": []}
    path = options.out / f"{file_name(results)}.json"
    measure_rows(rows, lambda row: measure_loop(row, device, budget), results, path)
    show(Console(width=min(Console().width, 80)), results)
    print(f"\nwrote {path}")
    return int(any("error" in row for row in results["rows"]))


def show(console: Console, results: dict[str, Any]) -> None:
    """Print the times and their ratios to the loop, then the errors."""
    console.print(
        "\nmilliseconds of a call on the device and as Python launches it; times as fast as the loop"
    )
    table = plain_table()
    for heading in ("row", "pass", "", "ms", "called", "x", "called x"):
        table.add_column(heading, justify="right" if heading in ("ms", "called", "x", "called x") else "left")
    for row in results["rows"]:
        for one in PASSES if "passes" in row else ():
            for name in NAMES:
                entry = row["passes"][one][name]
                if "missing" in entry:
                    table.add_row(row["name"], SHORT[one], name, entry["missing"])
                    continue
                times = (f"{entry[time]['median']:.3f}" for time in ("ms", "called_ms"))
                ratios = (f"{entry[ratio]:.1f}" for ratio in ("ratio", "called_ratio"))
                table.add_row(row["name"], SHORT[one], name, *times, *ratios)
    console.print(table)
    for row in results["rows"]:
        if "error" in row:
            console.print(f"{row['name']}: {row['error']}", markup=False, highlight=False)
