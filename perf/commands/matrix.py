"""`python -m perf matrix`: operators with a matrix state per head."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from perf.commands.ops import budget_of, chosen, protocol
from perf.commands.results import HERE, Device, RefusedError, file_name, measure_rows
from perf.matrix import measure_row, rows_of
from perf.matrix_peers import MATRIX_PEERS
from perf.matrix_report import show
from perf.rows import select
from perf.timing import keep_freed_memory


@dataclass(frozen=True)
class MatrixOptions:
    """Speed and memory of gate_loop with large heads and of the delta rule, beside softmax attention.

    Args:
        device: where to measure; by default on CUDA where there is one.
        rows: names of the rows to measure, all by default; a name that does not exist lists them.
        peers: measure other implementations too, those that are installed.
        without: with --peers, the names of those to leave out.
        out: folder for DEVICE-matrix.json.
        quick: tiny sizes and few repetitions, to see that all of it runs; the numbers mean nothing.
    """

    device: Device = HERE
    rows: tuple[str, ...] = ()
    peers: bool = False
    without: tuple[str, ...] = ()
    out: Path = Path("results/ops")
    quick: bool = False


def matrix(options: MatrixOptions, command: str) -> int:
    """Measure the rows, write and print the results; return the exit status.

    Raises:
        RefusedError: options that do not fit together, or a name that does not exist.
    """
    peers = chosen(MATRIX_PEERS, options.peers, options.without)
    try:
        rows, _ = select(options.rows, rows_of(options.device, quick=options.quick), ())
    except ValueError as error:
        raise RefusedError(error) from error
    device = torch.device(options.device)
    budget = budget_of(quick=options.quick)
    results: dict[str, Any] = {**protocol(device, budget, peers, command), "rows": []}
    if device.type == "cpu":
        results["keeps_freed_memory"] = keep_freed_memory()
    path = options.out / f"{file_name(results)}-matrix.json"
    measure_rows(rows, lambda row: measure_row(row, device, budget, peers), results, path)
    show(Console(width=min(Console().width, 80)), results)
    print(f"\nwrote {path}")
    return int(any("error" in row for row in results["rows"]))
