"""`python -m perf steps`: one decoding step of operators with a matrix state per head."""

from dataclasses import dataclass

import torch
from rich.console import Console

from perf.commands.ops import RowOptions, budget_of, chosen, protocol, selected, yardstick
from perf.commands.results import file_name, measure_rows
from perf.steps import measure_step, step_rows_of
from perf.steps_peers import STEP_PEERS
from perf.steps_report import show_steps


@dataclass(frozen=True)
class StepsOptions(RowOptions):
    """Speed of one step of gate_loop with large heads and of the delta rule, against a copy of the state."""


def steps(options: StepsOptions, command: str) -> int:
    """Measure the rows, write and print the results; return the exit status.

    Raises:
        RefusedError: options that do not fit together, or a name that does not exist.
    """
    peers = chosen(STEP_PEERS, options.peers, options.without)
    rows, _ = selected(options, step_rows_of(options.device, quick=options.quick))
    device, budget = torch.device(options.device), budget_of(quick=options.quick)
    results = protocol(device, budget, peers, command) | yardstick(device, budget, quick=options.quick)
    copy = results.get("copy_rate")
    results["rows"] = []
    path = options.out / f"{file_name(results)}-steps.json"
    measure_rows(rows, lambda row: measure_step(row, device, budget, peers, copy), results, path)
    show_steps(Console(width=min(Console().width, 80)), results)
    print(f"\nwrote {path}")
    return int(any("error" in row for row in results["rows"]))
