"""How fast tasks are drawn, by one process."""

import time
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from linrec.lab.bench import get_suite

Unit = Literal["samples", "tokens"]

# 100,000 ListOps in four minutes, and so on
ASKED: dict[str, tuple[float, Unit]] = {
    "lra-listops": (100_000 / 240, "samples"),
    "mqar": (1e6, "tokens"),
    "copying": (1e6, "tokens"),
    "lra-pathfinder": (50.0, "samples"),
}


@dataclass(frozen=True)
class TaskRow:
    """A task that is drawn, as the suite that has it says.

    Args:
        name: of the suite's entry.
        task: what is drawn; it has `draw`.
    """

    name: str
    task: Any


def task_rows() -> list[TaskRow]:
    """Return the tasks of all suites that are drawn; those that read files are not."""
    tasks = [(entry.name, entry.config().task) for entry in get_suite("all")]
    return [TaskRow(name, task) for name, task in tasks if hasattr(task, "draw")]


def measure_task(row: TaskRow, seconds: float, n: int) -> dict[str, Any]:
    """Draw n samples at a time for so many seconds.

    Returns:
        "samples", "tokens" (steps, where a sample has no tokens), "seconds", both "per_second", and for some
        what is asked and whether it is reached.
    """
    draw = row.task.draw
    random = np.random.default_rng(0)
    # compiles what is compiled
    draw(random, 1)
    samples = tokens = 0
    start = time.perf_counter()
    while not samples or time.perf_counter() - start < seconds:
        drawn = draw(random, n)
        inputs = drawn.inputs if hasattr(drawn, "inputs") else drawn.tokens
        samples, tokens = samples + len(inputs), tokens + inputs.shape[0] * inputs.shape[1]
    taken = time.perf_counter() - start
    found: dict[str, Any] = {"name": row.name, "samples": samples, "tokens": tokens, "seconds": taken}
    found["per_second"] = {"samples": samples / taken, "tokens": tokens / taken}
    if row.name in ASKED:
        rate, unit = ASKED[row.name]
        found["asked"] = {"per_second": rate, "unit": unit, "met": found["per_second"][unit] >= rate}
    return found
