"""Tables and pictures of trained runs, made from run folders or from tables of runs."""

from linrec.lab.report.arms import Arm, Comparison, compare_runs, group_runs
from linrec.lab.report.collect import collect_runs
from linrec.lab.report.pictures import (
    draw_accuracy_by_span,
    draw_learning_curves,
    draw_score_by_number,
    draw_transitions,
)
from linrec.lab.report.records import read_runs
from linrec.lab.report.write import write_report

__all__ = [
    "Arm",
    "Comparison",
    "collect_runs",
    "compare_runs",
    "draw_accuracy_by_span",
    "draw_learning_curves",
    "draw_score_by_number",
    "draw_transitions",
    "group_runs",
    "read_runs",
    "write_report",
]
