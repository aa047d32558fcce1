"""`python -m perf tasks`: how fast tasks are drawn."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from perf.commands.results import RefusedError, about, file_name, measure_rows
from perf.rows import select
from perf.table import plain_table, yes
from perf.tasks import measure_task, task_rows


@dataclass(frozen=True)
class TasksOptions:
    """Samples and tokens per second of the tasks that are drawn, by one process on one core.

    Args:
        device: tasks are drawn on the CPU.
        rows: these tasks alone, by their names in the suites; a name that does not exist lists them.
        out: folder for DEVICE.json.
        quick: few samples, to see that all of it runs; the numbers mean nothing.
    """

    device: Literal["cpu"] = "cpu"
    rows: tuple[str, ...] = ()
    out: Path = Path("results/tasks")
    quick: bool = False


def tasks(options: TasksOptions, command: str) -> int:
    """Draw the tasks, write the results, print them; return the exit status.

    Raises:
        RefusedError: a task that does not exist.
    """
    try:
        rows, _ = select(options.rows, task_rows(), ())
    except ValueError as error:
        raise RefusedError(error) from error
    device = torch.device(options.device)
    results: dict[str, Any] = {**about(device, command), "rows": []}
    path = options.out / f"{file_name(results)}.json"
    seconds, n = (0.0, 2) if options.quick else (2.0, 64)
    measure_rows(rows, lambda row: measure_task(row, seconds, n), results, path)
    _show(results["rows"])
    print(f"\nwrote {path}")
    return 0


def _show(rows: list[dict[str, Any]]) -> None:
    table = plain_table()
    table.add_column("task", no_wrap=True)
    for heading in ("samples/s", "tokens/s", "asked"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        found, asked = row["per_second"], row.get("asked")
        wanted = f"{asked['per_second']:,.0f} {asked['unit']} {yes(asked['met'])}" if asked else ""
        table.add_row(row["name"], f"{found['samples']:,.0f}", f"{found['tokens']:,.0f}", wanted)
    Console(width=min(Console().width, 80)).print(table)
