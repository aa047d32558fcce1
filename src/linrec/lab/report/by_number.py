"""The score against the one number in which runs differ, such as the length of a memory."""

import math
from collections.abc import Sequence

from matplotlib.figure import Figure

from linrec.lab.report import style
from linrec.lab.report.arms import Arm
from linrec.lab.report.scores import score_of
from linrec.lab.tasks import judged_by

# two numbers make no curve
FEWEST = 3
TITLES = {"accuracy": "accuracy", "mse": "mean squared error", "perplexity": "perplexity"}


def draw_score_by_number(arms: Sequence[Arm]) -> Figure | None:
    """Draw the score of every arm over the field in which the arms differ, with equal distances.

    Args:
        arms: the arms, at most one for each value of a field.

    Returns:
        The picture; None where arms differ in another field too, or in words, or where fewer than three
        arms have results.

    Example:
        >>> import dataclasses
        >>> from pathlib import Path
        >>> from linrec.lab.report import group_runs
        >>> from linrec.lab.train import Run, get_recipe
        >>> config, score = get_recipe("memory-horizon"), {"test": {"accuracy": 0.5}}
        >>> optims = [dataclasses.replace(config.optim, lr=lr) for lr in (0.01, 0.001, 0.1)]
        >>> configs = [dataclasses.replace(config, optim=optim) for optim in optims]
        >>> runs = [Run(Path("a"), config, [], score, {}) for config in configs]
        >>> axes = draw_score_by_number(group_runs(runs)).axes[0]
        >>> axes.get_xlabel(), [label.get_text() for label in axes.get_xticklabels()]
        ('lr', ['0.001', '0.01', '0.1'])
    """
    points = []
    for arm in arms:
        metric = judged_by(arm.runs[0].config.task)
        scores = [score for result in arm.results if (score := score_of(metric, result)) is not None]
        number = next(iter(arm.settings.values()), None)
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            return None
        finite = [score for score, _ in scores if math.isfinite(score)]
        if finite:
            points.append((number, finite, f"{scores[0][1]} {TITLES[metric]}"))
    if len(points) < FEWEST or any(len(arm.settings) > 1 for arm in arms):
        return None
    points.sort(key=lambda point: point[0])
    places, columns = range(len(points)), [scores for _, scores, _ in points]
    figure = style.make_figure(height=3.2)
    axes = figure.subplots()
    style.draw_mean_and_range(axes, places, columns, colour=style.colour(0), marker="o")
    style.finish_axes(axes, x=next(iter(arms[0].settings)).rpartition(".")[2], y=points[0][2])
    axes.set_xticks(places, [str(number) for number, _, _ in points])
    return figure
