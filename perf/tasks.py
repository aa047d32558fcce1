"""`python -m perf tasks`: how fast one process draws the tasks."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console

from linrec.lab.bench import get_suite
from perf.engine import Report, RowOptions, selected
from perf.table import show_table, yes

Unit = Literal["samples", "tokens"]

# 100,000 ListOps in four minutes, and so on
ASKED: dict[str, tuple[float, Unit]] = {
    "lra-listops": (100_000 / 240, "samples"),
    "mqar": (1e6, "tokens"),
    "copying": (1e6, "tokens"),
    "lra-pathfinder": (50.0, "samples"),
}


@dataclass(frozen=True)
class TasksOptions(RowOptions):
    """Samples and tokens per second of the tasks that are drawn, by one process on one core.

    Args:
        device: tasks are drawn on the CPU.
        rows: these tasks alone, by their names in the suites; an unknown name lists them.
        out: folder for DEVICE.json.
        quick: few samples, to see that all of it runs; the numbers mean nothing.
    """

    device: Literal["cpu"] = "cpu"
    out: Path = Path("results/tasks")


def tasks(options: TasksOptions, command: str) -> int:
    """Draw the tasks, write and print the results; return the exit status."""
    rows = selected(options.rows, task_rows())
    seconds, n = (0.0, 2) if options.quick else (2.0, 64)
    report = Report(options, command)
    report.measure(
        {name: name for name in rows},
        lambda name: {"name": name, **measure_task(name, rows[name], seconds, n)},
    )
    return report.finish(show)


def task_rows() -> dict[str, Any]:
    """Return the tasks that the suites draw, by the entry's name; the other tasks read files."""
    entries = {entry.name: entry.config().task for entry in get_suite("all")}
    return {name: task for name, task in entries.items() if hasattr(task, "draw")}


def measure_task(name: str, task: Any, seconds: float, n: int) -> dict[str, Any]:
    """Draw n samples at a time for so many seconds; return the speeds, and "asked" where a target is set."""
    random = np.random.default_rng(0)
    # the first call may compile
    task.draw(random, 1)
    samples = tokens = 0
    start = time.perf_counter()
    while not samples or time.perf_counter() - start < seconds:
        drawn = task.draw(random, n)
        inputs = drawn.inputs if hasattr(drawn, "inputs") else drawn.tokens
        samples, tokens = samples + len(inputs), tokens + inputs.shape[0] * inputs.shape[1]
    taken = time.perf_counter() - start
    found: dict[str, Any] = {"samples": samples, "tokens": tokens, "seconds": taken}
    found["per_second"] = {"samples": samples / taken, "tokens": tokens / taken}
    if name in ASKED:
        rate, unit = ASKED[name]
        found["asked"] = {"per_second": rate, "unit": unit, "met": found["per_second"][unit] >= rate}
    return found


def show(console: Console, results: dict[str, Any]) -> None:
    """Print the speeds."""
    lines = []
    for row in results["rows"]:
        found, asked = row["per_second"], row.get("asked")
        wanted = f"{asked['per_second']:,.0f} {asked['unit']} {yes(asked['met'])}" if asked else ""
        lines.append([row["name"], f"{found['samples']:,.0f}", f"{found['tokens']:,.0f}", wanted])
    show_table(console, "", ("task", "samples/s", "tokens/s", "asked"), lines)
