"""What rows have in common: the seeds of a mixer on a task, and what a task says of scores."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Standing", "level", "standings", "validation_loss"]


@dataclass(frozen=True)
class Standing:
    """A mixer on a task: what its seeds have in common, and their scores.

    Args:
        task: name of the suite's entry.
        mixer: its label, with the arguments that were given.
        rows: of its jobs that are done, of the learning rate that was gone on with; one a seed.
        failed: rows of its other jobs.
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
        """Score of every seed on the test split."""
        return [row["score"] for row in self.rows]

    @property
    def by_length(self) -> dict[int, list[float]]:
        """Score of every seed at the lengths that are probed with all of them, by ascending length."""
        if not self.rows:
            return {}
        key = "accuracy" if self.metric == "accuracy" else "loss"
        names = set.intersection(*({*row["probes"]} for row in self.rows))
        lengths = sorted(int(name) for name in names if name.isdigit())
        return {length: [row["probes"][str(length)][key] for row in self.rows] for length in lengths}

    @property
    def seeds(self) -> int:
        """How many seeds were asked for, those that failed too."""
        return len({row["seed"] for row in (*self.rows, *self.failed)})

    @property
    def parameters(self) -> int | None:
        """Of its models; None where they cannot be built."""
        parameters: int | None = (self.rows or self.failed)[0]["parameters"]
        return parameters

    @property
    def state(self) -> int:
        """Elements of a sequence's state at its end; until a model has run, those that it says it has."""
        first = (self.rows or self.failed)[0]
        return first["state_size"] if first.get("state_elements") is None else first["state_elements"]


def standings(rows: Sequence[dict[str, Any]]) -> list[Standing]:
    """Group rows by task and mixer; of several learning rates, the one of the lowest validation loss counts.

    Args:
        rows: of `make_rows`.

    Returns:
        In the order of the rows.
    """
    grouped: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        grouped.setdefault((row["task"], row["mixer"]), []).append(row)
    found = []
    for (task, mixer), of_both in grouped.items():
        done = [row for row in of_both if row["status"] == "done"]
        # the rates were tried with one seed
        tried = [row for row in done if row["seed"] == done[0]["seed"]]
        losses = {row["lr"]: validation_loss(row) for row in tried}
        rate = min(losses, key=lambda lr: losses[lr]) if tried else None
        failed = tuple(row for row in of_both if row["status"] != "done")
        found.append(Standing(task, mixer, tuple(row for row in done if row["lr"] == rate), failed))
    return found


def validation_loss(row: dict[str, Any]) -> float:
    """Return the loss that learning rates are chosen by; infinity for none, and for what is no number."""
    loss: float = row["validation"].get("loss", math.inf)
    return math.inf if math.isnan(loss) else loss


def level(rows: Sequence[dict[str, Any]], task: str, name: str) -> float | None:
    """Return what a task says of scores, "chance" or "trivial_score"; None where no job came so far."""
    known = (row.get(name) for row in rows if row["task"] == task)
    return next((value for value in known if value is not None), None)
