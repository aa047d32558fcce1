"""`python -m perf tasks`: how fast one process draws the tasks."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from linrec.lab.bench import get_suite
from perf.command import RowCommand, selected
from perf.engine import Record
from perf.table import Part, Table
from perf.timing import Bench

# 100,000 ListOps in four minutes, and so on
ASKED: dict[str, tuple[float, Literal["samples", "tokens"]]] = {
    "lra-listops": (100_000 / 240, "samples"),
    "mqar": (1e6, "tokens"),
    "copying": (1e6, "tokens"),
    "lra-pathfinder": (50.0, "samples"),
}


@dataclass(frozen=True)
class Tasks(RowCommand):
    """Samples and tokens per second of the tasks that are drawn, by one process on one core.

    Args:
        device: tasks are drawn on the CPU.
        rows: these tasks alone, by their names in the suites; an unknown name lists them.
    """

    device: Literal["cpu"] = "cpu"

    def chosen(self) -> dict[str, Any]:
        return {name: (name, task) for name, task in selected(self.rows, drawn_tasks()).items()}

    def measure(self, bench: Bench, row: tuple[str, Any]) -> Record:
        return measure_task(*row, *((0.0, 2) if self.quick else (2.0, 64)))

    @staticmethod
    def show(results: Record) -> Iterator[Part]:
        yield Table(
            "",
            "task {name} | samples/s {per_second[samples]:,.0f} | tokens/s {per_second[tokens]:,.0f} | "
            "asked {asked[per_second]:,.0f} {asked[unit]} {asked[met]:yes}",
            results["rows"],
        )


def drawn_tasks() -> dict[str, Any]:
    """Return the tasks that the suites draw, by the entry's name; the other tasks read files."""
    entries = {entry.name: entry.config().task for entry in get_suite("all")}
    return {name: task for name, task in entries.items() if hasattr(task, "draw")}


def measure_task(name: str, task: Any, seconds: float, n: int) -> Record:
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
    speeds = {"samples": samples / taken, "tokens": tokens / taken}
    found = {"name": name, "samples": samples, "tokens": tokens, "seconds": taken, "per_second": speeds}
    if name in ASKED:
        rate, unit = ASKED[name]
        found["asked"] = {"per_second": rate, "unit": unit, "met": speeds[unit] >= rate}
    return found
