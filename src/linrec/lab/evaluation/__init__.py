"""Evaluation of language models: perplexity by context length, in several units."""

from linrec.lab.evaluation.perplexity import Score, evaluate_carried, evaluate_windows
from linrec.lab.evaluation.write import (
    ChosenText,
    Evaluation,
    choose_text,
    default_lengths,
    evaluate_run,
    parse_lengths,
)

__all__ = [
    "ChosenText",
    "Evaluation",
    "Score",
    "choose_text",
    "default_lengths",
    "evaluate_carried",
    "evaluate_run",
    "evaluate_windows",
    "parse_lengths",
]
