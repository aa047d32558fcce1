"""Tables and pictures of trained runs, made from run folders or from tables of runs."""

from linrec.lab.report.arms import Arm, Comparison, compare_runs, group_runs
from linrec.lab.report.collect import collect_runs
from linrec.lab.report.pictures import (
    Magnitudes,
    draw_accuracy_by_span,
    draw_learning_curves,
    draw_score_by_number,
    draw_transitions,
    transition_magnitudes,
)
from linrec.lab.report.records import read_runs
from linrec.lab.report.write import write_report

__all__ = [
    "Arm",
    "Comparison",
    "Magnitudes",
    "collect_runs",
    "compare_runs",
    "draw_accuracy_by_span",
    "draw_learning_curves",
    "draw_score_by_number",
    "draw_transitions",
    "group_runs",
    "read_runs",
    "transition_magnitudes",
    "write_report",
]
