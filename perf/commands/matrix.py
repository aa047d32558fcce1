"""`python -m perf matrix`: operators with a matrix state per head."""

from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from perf.commands.ops import RowOptions, budget_of, chosen, protocol, selected
from perf.commands.results import file_name, measure_rows
from perf.matrix import head_rows, measure_row, rows_of
from perf.matrix_peers import MATRIX_PEERS
from perf.matrix_report import show, show_heads
from perf.timing import copy_rate, keep_freed_memory, matmul_rate


@dataclass(frozen=True)
class MatrixOptions(RowOptions):
    """Speed and memory of gate_loop with large heads and of the delta rule, beside softmax attention.

    Args:
        heads: measure head sizes from 16 x 16 to 256 x 512 in place of the rows, against the limits of memory
            and of matrix products, and write DEVICE-heads.json.
    """

    heads: bool = False


def matrix(options: MatrixOptions, command: str) -> int:
    """Measure the rows, write and print the results; return the exit status.

    Raises:
        RefusedError: options that do not fit together, or a name that does not exist.
    """
    peers = chosen(MATRIX_PEERS, options.peers, options.without)
    quick = options.quick
    rows = head_rows(quick=quick) if options.heads else rows_of(options.device, quick=quick)
    rows, _ = selected(options, rows)
    device = torch.device(options.device)
    budget = budget_of(quick=quick)
    results: dict[str, Any] = {**protocol(device, budget, peers, command), "rows": []}
    if device.type == "cpu":
        results["keeps_freed_memory"] = keep_freed_memory()
    limits = None
    if options.heads:
        n_bytes, size = (2**20, 64) if quick else (2**30, 8192)
        results["copy_rate"] = copy_rate(device, budget, n_bytes)
        results["matmul_rate"] = matmul_rate(device, torch.bfloat16, budget, size)
        limits = results["copy_rate"], results["matmul_rate"]
    path = options.out / f"{file_name(results)}-{'heads' if options.heads else 'matrix'}.json"
    measure_rows(rows, lambda row: measure_row(row, device, budget, peers, limits), results, path)
    (show_heads if options.heads else show)(Console(width=min(Console().width, 80)), results)
    print(f"\nwrote {path}")
    return int(any("error" in row for row in results["rows"]))
