"""`python -m perf loss`: the head and its cross-entropy."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from linrec.errors import unknown
from linrec.lab.train.fabric import matmul_precision
from perf.commands.ops import budget_of
from perf.commands.results import Options, RefusedError, about, file_name, measure_rows
from perf.loss import LIGER, LOSSES, QUICK, ROWS, measure_loss
from perf.table import plain_table
from perf.timing import matmul_rate

PACKAGES = ("liger-kernel",)


@dataclass(frozen=True)
class LossOptions(Options):
    """Speed and memory of the head and its cross-entropy, forward and backward, without all logits in memory.

    Args:
        rows: names of the rows; none is all rows.
        peers: also measure Liger's fused kernel.
        out: folder for DEVICE.json.
    """

    rows: tuple[str, ...] = ()
    peers: bool = False
    out: Path = Path("results/loss")


def loss(options: LossOptions, command: str) -> int:
    """Measure the rows, write and print the results; return the exit status.

    Raises:
        RefusedError: a name that does not exist.
    """
    device, budget = torch.device(options.device), budget_of(quick=options.quick)
    known = {row.name: row for row in ((QUICK,) if options.quick else ROWS)}
    for name in options.rows:
        if name not in known:
            raise RefusedError(unknown("row", name, list(known)))
    rows = [row for name, row in known.items() if not options.rows or name in options.rows]
    names = tuple(name for name in LOSSES if options.peers or name != LIGER)
    results: dict[str, Any] = {**about(device, command, PACKAGES if options.peers else ()), "rows": []}
    path = options.out / f"{file_name(results)}.json"
    with matmul_precision("high"):
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        size = 64 if options.quick else 8192 if device.type == "cuda" else 1024
        rate = results["matmul_rate"] = matmul_rate(device, dtype, budget, size)
        measure_rows(rows, lambda row: measure_loss(row, device, budget, rate, names), results, path)
    show(Console(width=min(Console().width, 80)), results)
    print(f"\nwrote {path}")
    return int(any("error" in row for row in results["rows"]))


def show(console: Console, results: dict[str, Any]) -> None:
    """Print times, shares and memory, then the errors."""
    console.print(
        "\nforward and backward; % of the rate of a large matrix product; GiB over the inputs, with gradients"
    )
    table = plain_table()
    table.add_column("rows x width x classes")
    table.add_column("")
    for heading in ("ms", "%", "GiB"):
        table.add_column(heading, justify="right")
    for row in results["rows"]:
        for name, entry in row["losses"].items():
            if "missing" in entry:
                table.add_row(row["name"], name, entry["missing"])
                continue
            peak = entry["peak_bytes"]
            memory = "" if peak is None else f"{peak / 2**30:.2f}"
            table.add_row(
                row["name"], name, f"{entry['ms']['median']:.2f}", f"{100 * entry['share']:.0f}", memory
            )
    console.print(table)
    for row in results["rows"]:
        if "error" in row:
            console.print(f"{row['name']}: {row['error']}", markup=False, highlight=False)
