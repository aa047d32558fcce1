"""Learning curves: loss and accuracy over the steps, in training and validation."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from linrec.lab.report import style
from linrec.lab.report.arms import Arm
from linrec.lab.report.style import LineStyle
from linrec.lab.tasks import Task
from linrec.lab.train import Run

SPLITS: tuple[tuple[str, LineStyle], ...] = (("validation", "-"), ("train", ":"))
PANELS = (("loss", "cross-entropy (nats)"), ("accuracy", "accuracy"))
# of regressions alone
ERROR = (("loss", "mean squared error"),)


def draw_learning_curves(arms: Sequence[Arm]) -> Figure | None:
    """Draw loss and accuracy of every arm over the steps; of regressions alone the mean squared error.

    Runs that logged at different steps are interpolated linearly; an arm's curve ends where its shortest run
    does.

    Args:
        arms: the arms, each a colour.

    Returns:
        The picture; None where no run has logged anything.

    Example:
        >>> from pathlib import Path
        >>> from linrec.lab.report import group_runs
        >>> from linrec.lab.train import get_recipe
        >>> records = [{"step": s, "split": "train", "loss": 4.0 - s, "accuracy": 0.1 * s} for s in (1, 2)]
        >>> run = Run(Path("a"), get_recipe("memory-horizon"), records, None, {})
        >>> [axes.get_ylabel() for axes in draw_learning_curves(group_runs([run])).axes]
        ['cross-entropy (nats)', 'accuracy']
    """
    objectives = {run.config.task.objective for arm in arms for run in arm.runs}
    quantities = ERROR if objectives == {"regression"} else PANELS
    figure = style.make_figure(height=3.2 * len(quantities))
    panels = figure.subplots(len(quantities), 1, sharex=True, squeeze=False)[:, 0]
    drawn = False
    for axes, (quantity, title) in zip(panels, quantities, strict=True):
        for index, arm in enumerate(arms):
            for split, line in SPLITS:
                steps, rows = _aligned(arm.runs, split, quantity)
                if rows:
                    drawn = True
                    columns = zip(*rows, strict=True)
                    style.draw_mean_and_range(axes, steps, columns, colour=style.colour(index), style=line)
        style.finish_axes(axes, y=title)
        _mark_chance(axes, quantity, arms)
    if quantities is ERROR:
        # errors fall by powers of ten
        panels[0].set_yscale("log")
    else:
        panels[-1].set_ylim(bottom=0)
    panels[-1].set_xlabel("step", fontsize=style.LETTERS)

    handles = [
        Line2D([], [], color=style.colour(index), linewidth=2.5, label=arm.label)
        for index, arm in enumerate(arms)
    ]
    handles += [Line2D([], [], color="black", linestyle=line, label=split) for split, line in SPLITS]
    style.add_legend(figure, handles)
    return figure if drawn else None


def _aligned(runs: Sequence[Run], split: str, quantity: str) -> tuple[list[float], list[list[float]]]:
    series = []
    for run in runs:
        records = [
            (record["step"], record[quantity])
            for record in run.metrics
            if record["split"] == split and math.isfinite(record.get(quantity, math.nan))
        ]
        if records:
            series.append(np.array(records, dtype=float).T)
    if not series:
        return [], []
    first, last = max(steps[0] for steps, _ in series), min(steps[-1] for steps, _ in series)
    grid = np.unique(np.concatenate([steps for steps, _ in series]))
    grid = grid[(grid >= first) & (grid <= last)]
    return grid.tolist(), [np.interp(grid, steps, values).tolist() for steps, values in series]


def _mark_chance(axes: Axes, quantity: str, arms: Sequence[Arm]) -> None:
    tasks = {run.config.task for arm in arms for run in arm.runs}
    levels = {mark for task in tasks if (mark := _chance(task, quantity)) is not None}
    for level, name in sorted(levels):
        axes.axhline(level, color=style.GREY, linewidth=1, linestyle=(0, (5, 3)))
        axes.annotate(
            name,
            (1, level),
            xycoords=("axes fraction", "data"),
            xytext=(0, 2),
            textcoords="offset points",
            ha="right",
            va="bottom",
            color=style.GREY,
            fontsize=style.LETTERS - 1,
        )


def _chance(task: Task, quantity: str) -> tuple[float, str] | None:
    """Return the score of a guess and its name: uniform over classes, or a constant for real numbers."""
    if task.objective == "regression":
        return (task.chance, "a constant") if quantity == "loss" else None
    return task.chance if quantity == "accuracy" else -math.log(task.chance), "chance"
