"""Test accuracy against the memory that the answer needs (GateLoop, figure 7)."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from linrec.lab.report import style
from linrec.lab.report.arms import Arm

# an accuracy above chance by less than this share of the rest counts as chance
LEARNED = 0.05

# positions at which an accuracy is better than noise
ENOUGH = 200


def draw_accuracy_by_span(arms: Sequence[Arm]) -> Figure | None:
    """Draw the test accuracy of every arm over the required memory span.

    The picture ends a little after the last span at which any arm is above chance, but for the noise of few
    samples. Beyond it the lines are flat.

    Args:
        arms: the arms, each a colour.

    Returns:
        The picture; None where no run has a result by span.

    Source: GateLoop (Katsch 2023), figure 7.

    Example:
        >>> from pathlib import Path
        >>> from linrec.lab.report import group_runs
        >>> from linrec.lab.train import Run, get_recipe
        >>> result = {"test": {"span_curve": {"width": 10, "accuracy": [1, 0.5], "count": [300, 300]}}}
        >>> run = Run(Path("a"), get_recipe("memory-horizon"), [], result, {})
        >>> draw_accuracy_by_span(group_runs([run])).axes[0].lines[0].get_xdata().tolist()
        [5.5, 15.5]
    """
    curves = [[result["test"]["span_curve"] for result in arm.results if _by_span(result)] for arm in arms]
    if not any(curves):
        return None
    chances = sorted({run.config.task.chance for arm in arms for run in arm.runs})
    figure = style.make_figure(height=3.7)
    axes = figure.subplots()
    for index, (arm, members) in enumerate(zip(arms, curves, strict=True)):
        if members:
            spans, rows = _aligned(members)
            columns = zip(*rows, strict=True)
            style.draw_mean_and_range(axes, spans, columns, colour=style.colour(index), label=arm.label)
    for chance in chances:
        label = f"chance {chance:.3g}"
        axes.axhline(chance, color=style.GREY, linewidth=1, linestyle=(0, (5, 3)), label=label)
    style.finish_axes(axes, x="required memory span (numbers since the reset)", y="test accuracy")
    axes.set_ylim(0, 1.02)
    axes.set_xlim(0, _visible(curves, floor=chances[0] + LEARNED * (1 - chances[0])))
    style.add_legend(figure, axes.lines)
    return figure


def _by_span(result: dict[str, Any]) -> bool:
    return "span_curve" in result["test"]


def _aligned(curves: Sequence[dict[str, Any]]) -> tuple[list[float], list[list[float]]]:
    # runs of an arm differ in their bins only where the task's seed differs too, and then only far out
    width = curves[0]["width"]
    columns = zip(*(curve["accuracy"] for curve in curves), strict=False)
    present = [i for i, column in enumerate(columns) if None not in column]
    middles = [width * i + (width + 1) / 2 for i in present]
    return middles, [[curve["accuracy"][i] for i in present] for curve in curves]


def _visible(curves: Sequence[Sequence[dict[str, Any]]], *, floor: float) -> float:
    longest, learned = 0, 0
    for curve in (curve for members in curves for curve in members):
        width = curve["width"]
        longest = max(longest, width * len(curve["accuracy"]))
        for i, (accuracy, count) in enumerate(zip(curve["accuracy"], curve["count"], strict=False)):
            if count >= ENOUGH and accuracy is not None and accuracy > floor:
                learned = max(learned, width * (i + 1))
    return min(longest, 1.4 * learned) if learned else longest
