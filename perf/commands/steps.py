"""`python -m perf steps`: one decoding step of operators with a matrix state per head."""

from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from perf.commands.ops import budget_of, chosen, protocol, yardstick
from perf.commands.results import HERE, Device, RefusedError, file_name, measure_rows
from perf.rows import select
from perf.steps import measure_step, step_rows_of
from perf.steps_peers import STEP_PEERS
from perf.steps_report import show_steps


@dataclass(frozen=True)
class StepsOptions:
    """Speed of one step of gate_loop with large heads and of the delta rule, against a copy of the state.

    Args:
        device: where to measure; by default on CUDA where there is one.
        rows: names of the rows to measure, all by default; a name that does not exist lists them.
        peers: measure other implementations too, those that are installed.
        without: with --peers, the names of those to leave out.
        out: folder for DEVICE-steps.json.
        quick: tiny sizes and few repetitions, to see that all of it runs; the numbers mean nothing.
    """

    device: Device = HERE
    rows: tuple[str, ...] = ()
    peers: bool = False
    without: tuple[str, ...] = ()
    out: Path = Path("results/ops")
    quick: bool = False


def steps(options: StepsOptions, command: str) -> int:
    """Measure the rows, write and print the results; return the exit status.

    Raises:
        RefusedError: options that do not fit together, or a name that does not exist.
    """
    peers = chosen(STEP_PEERS, options.peers, options.without)
    try:
        rows, _ = select(options.rows, step_rows_of(options.device, quick=options.quick), ())
    except ValueError as error:
        raise RefusedError(error) from error
    device, budget = torch.device(options.device), budget_of(quick=options.quick)
    results = protocol(device, budget, peers, command) | yardstick(device, budget, quick=options.quick)
    copy = results.get("copy_rate")
    results["rows"] = []
    path = options.out / f"{file_name(results)}-steps.json"
    measure_rows(rows, lambda row: measure_step(row, device, budget, peers, copy), results, path)
    show_steps(Console(width=min(Console().width, 80)), results)
    print(f"\nwrote {path}")
    return int(any("error" in row for row in results["rows"]))
