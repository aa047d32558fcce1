"""Evaluation of language models: perplexity by context length, in several units."""

from linrec.lab.evaluation.lengths import default_lengths, parse_lengths
from linrec.lab.evaluation.perplexity import Score, evaluate_carried, evaluate_windows
from linrec.lab.evaluation.text import ChosenText, choose_text
from linrec.lab.evaluation.write import Evaluation, evaluate_run

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
