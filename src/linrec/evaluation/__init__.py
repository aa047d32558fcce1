"""Evaluation of language models: perplexity by context length, in several units."""

from linrec.evaluation.lengths import default_lengths, parse_lengths
from linrec.evaluation.perplexity import Score, evaluate_carried, evaluate_windows
from linrec.evaluation.text import ChosenText, choose_text
from linrec.evaluation.write import Evaluation, evaluate_run

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
