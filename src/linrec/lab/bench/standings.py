"""Standings: rows grouped by task and mixer, over seeds, and the baseline scores of tasks."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from linrec.lab.tasks.images import NOISES

# levels of probes: steps, or a share
LEVEL = re.compile(r"[0-9]{1,15}(\.[0-9]+)?")

__all__ = ["Standing", "level", "standings", "validation_loss"]


@dataclass(frozen=True)
class Standing:
    """The results of a mixer on a task over all seeds.

    Args:
        task: name of the suite's entry.
        mixer: label of the mixer, with its explicit arguments.
        rows: rows of the finished jobs at the chosen learning rate, a row for each seed.
        failed: rows of the jobs that are not done.
    """

    task: str
    mixer: str
    rows: tuple[dict[str, Any], ...]
    failed: tuple[dict[str, Any], ...] = ()

    @property
    def metric(self) -> str:
        """Name of the score: "accuracy", "mse" or "perplexity"."""
        metric: str = (self.rows or self.failed)[0]["metric"]
        return metric

    @property
    def scores(self) -> list[float]:
        """The score of every seed on the test split."""
        return [row["score"] for row in self.rows]

    @property
    def probes(self) -> dict[str, dict[float, list[float]]]:
        """The scores of every seed by kind of probe and by level, ascending.

        The level of the kind "length" is the number of steps. A kind of noise has the levels in the names of
        probes, such as 0.2 in "noise 0.2", and the scores on the test split at level 0. Probes that some
        seed lacks are left out.
        """
        if not self.rows:
            return {}
        key = "accuracy" if self.metric == "accuracy" else "loss"
        found: dict[str, dict[float, list[float]]] = {}
        for name in set.intersection(*({*row["probes"]} for row in self.rows)):
            kind, _, level = name.rpartition(" ")
            scores = [row["probes"][name].get(key) for row in self.rows]
            if None in scores:
                continue
            if kind in NOISES and LEVEL.fullmatch(level):
                found.setdefault(kind, {0: self.scores})[float(level)] = scores
            elif LEVEL.fullmatch(name) and name.isdecimal():
                found.setdefault("length", {})[int(name)] = scores
        return {kind: dict(sorted(by_level.items())) for kind, by_level in found.items()}

    @property
    def seeds(self) -> int:
        """The number of seeds, failed seeds included."""
        return len({row["seed"] for row in (*self.rows, *self.failed)})

    @property
    def parameters(self) -> int | None:
        """The number of parameters of the model; None if the model cannot be built."""
        parameters: int | None = (self.rows or self.failed)[0]["parameters"]
        return parameters

    @property
    def state(self) -> int:
        """The number of state elements after a sequence; until it is measured, the model's own count."""
        first = (self.rows or self.failed)[0]
        return first["state_size"] if first.get("state_elements") is None else first["state_elements"]


def standings(rows: Sequence[dict[str, Any]]) -> list[Standing]:
    """Group rows by task and mixer, keeping the learning rate with the lowest validation loss.

    Args:
        rows: rows from `make_rows`.

    Returns:
        The standings, in the order of the rows.
    """
    grouped: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        grouped.setdefault((row["task"], row["mixer"]), []).append(row)
    found = []
    for (task, mixer), of_both in grouped.items():
        done = [row for row in of_both if row["status"] == "done"]
        # the learning rates were tried with a single seed
        tried = [row for row in done if row["seed"] == done[0]["seed"]]
        losses = {row["lr"]: validation_loss(row) for row in tried}
        rate = min(losses, key=lambda lr: losses[lr]) if tried else None
        failed = tuple(row for row in of_both if row["status"] != "done")
        found.append(Standing(task, mixer, tuple(row for row in done if row["lr"] == rate), failed))
    return found


def validation_loss(row: dict[str, Any]) -> float:
    """Return the validation loss by which learning rates are chosen; infinity if it is missing or NaN."""
    loss: float | None = row["validation"].get("loss")
    return math.inf if loss is None or math.isnan(loss) else loss


def level(rows: Sequence[dict[str, Any]], task: str, name: str) -> float | None:
    """Return a task's baseline score, "chance" or "trivial_score", or None if no job has computed it."""
    known = (row.get(name) for row in rows if row["task"] == task)
    return next((value for value in known if value is not None), None)
