"""The score by which models of a task are compared, and the mean and spread of a number over seeds."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

FORMATS = {"accuracy": ",.3f", "mse": ",.6f", "perplexity": ",.2f", "loss": ",.3f"}
"""How scores are written, mean and spread alike, by metric; "loss" is in nats."""


TITLES = {"accuracy": "accuracy", "mse": "mean squared error", "perplexity": "perplexity"}


def score_of(metric: str, result: Mapping[str, Any]) -> tuple[float, str] | None:
    """Return the score of a result and the name of its split: the test split, or validation without that.

    None stands for a score that is missing or null. `metric` is that of `linrec.lab.tasks.judged_by`.
    """
    split = next((name for name in ("test", "validation") if result.get(name)), None)
    if split is None:
        return None
    score = score_in(metric, result[split])
    return None if score is None else (score, split)


def score_in(metric: str, scores: Mapping[str, Any]) -> float | None:
    """Return the score of a split, or None if it is missing or null."""
    score: float | None = scores.get("accuracy" if metric == "accuracy" else "loss")
    # the exponential of more overflows
    return math.exp(min(score, 700)) if metric == "perplexity" and score is not None else score


def better(metric: str, score: float, other: float) -> bool:
    """Return whether a score is better than another; higher accuracies and lower errors are better."""
    return score > other if metric == "accuracy" else score < other


class MeanAndSpread(NamedTuple):
    """The mean, and the standard deviation of a sample with n - 1, which is None for a single seed."""

    mean: float
    spread: float | None


def mean_and_spread(values: Sequence[float]) -> MeanAndSpread:
    """Return mean and standard deviation of at least one value."""
    if not all(map(math.isfinite, values)):
        # `fmean` and `stdev` raise for some of these
        return MeanAndSpread(sum(values) / len(values), None if len(values) == 1 else math.nan)
    return MeanAndSpread(statistics.fmean(values), None if len(values) == 1 else statistics.stdev(values))


def format_mean_and_spread(values: Sequence[float], mean_format: str = ",.3f") -> str:
    """Return "mean ± standard deviation", "mean (1 seed)", or a dash for no value."""
    if not values:
        return "–"
    mean, spread = mean_and_spread(values)
    written = format(mean, mean_format)
    if spread is None:
        return f"{written} (1 seed)"
    return f"{written} ± {format(spread, mean_format)}"
