"""The score by which models of a task are compared."""

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["FORMATS", "better", "score_of"]

FORMATS = {"accuracy": ",.3f", "mse": ",.6f", "perplexity": ",.2f", "loss": ",.3f"}
"""How scores are written, mean and spread alike, by metric; "loss" is in nats."""


def score_of(metric: str, result: Mapping[str, Any]) -> tuple[float, str] | None:
    """Return the score of a result, and the name of its split.

    Args:
        metric: metric of the task, from `linrec.lab.tasks.judged_by`.
        result: has the scores of "test" and "validation"; a text need not have a test split.

    Returns:
        None if neither split has scores, or if the score is missing or null.

    Example:
        >>> score_of("mse", {"test": {}, "validation": {"loss": 0.25}})
        (0.25, 'validation')
        >>> score_of("accuracy", {"test": {"accuracy": None}, "validation": {}}) is None
        True
    """
    split = next((name for name in ("test", "validation") if result.get(name)), None)
    if split is None:
        return None
    score = result[split].get("accuracy" if metric == "accuracy" else "loss")
    if score is None:
        return None
    # the exponential of more overflows
    return (math.exp(min(score, 700)) if metric == "perplexity" else score), split


def better(metric: str, score: float, other: float) -> bool:
    """Return whether a score is better than another; higher accuracies and lower errors are better.

    Example:
        >>> better("accuracy", 0.9, 0.5), better("mse", 0.9, 0.5)
        (True, False)
    """
    return score > other if metric == "accuracy" else score < other
