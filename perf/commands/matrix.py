"""`python -m perf matrix`: operators with a matrix state per head."""

from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from perf.commands.ops import RowOptions, budget_of, chosen, protocol, selected
from perf.commands.results import file_name, measure_rows
from perf.matrix import measure_row, rows_of
from perf.matrix_peers import MATRIX_PEERS
from perf.matrix_report import show
from perf.timing import keep_freed_memory


@dataclass(frozen=True)
class MatrixOptions(RowOptions):
    """Speed and memory of gate_loop with large heads and of the delta rule, beside softmax attention."""


def matrix(options: MatrixOptions, command: str) -> int:
    """Measure the rows, write and print the results; return the exit status.

    Raises:
        RefusedError: options that do not fit together, or a name that does not exist.
    """
    peers = chosen(MATRIX_PEERS, options.peers, options.without)
    rows, _ = selected(options, rows_of(options.device, quick=options.quick))
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
