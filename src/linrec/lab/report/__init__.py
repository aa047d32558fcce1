"""Tables and pictures of trained runs, made from run folders or from tables of runs."""

from linrec.lab.report.arms import Arm, group_runs
from linrec.lab.report.baseline import Comparison, compare_runs
from linrec.lab.report.by_number import draw_score_by_number
from linrec.lab.report.collect import collect_runs
from linrec.lab.report.curves import draw_learning_curves
from linrec.lab.report.spans import draw_accuracy_by_span
from linrec.lab.report.stored import read_runs
from linrec.lab.report.transitions import Magnitudes, draw_transitions, transition_magnitudes
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
