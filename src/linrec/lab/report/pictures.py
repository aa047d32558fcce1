"""Pictures of a report: learning curves, accuracy by span, score by a number, and state transitions."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

from linrec.lab import style
from linrec.lab.inspection.collect import Layer
from linrec.lab.report.arms import Arm
from linrec.lab.style import TITLES
from linrec.lab.tasks import Task

SPLITS: tuple[tuple[str, style.Kind], ...] = (("validation", "line"), ("train", "dotted"))
PANELS = (("loss", "cross-entropy (nats)"), ("accuracy", "accuracy"))
# of regressions alone
ERROR = (("loss", "mean squared error"),)
# an accuracy above chance by less than this share of the rest counts as chance
LEARNED = 0.05
# positions at which an accuracy is better than noise
ENOUGH = 200
# two numbers make no curve
FEWEST = 3
# steps to either side of a reset in the enlarged part
AROUND = 16
RESET = "#D55E00"


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
        >>> from linrec.lab.train import Run, get_recipe
        >>> records = [{"step": s, "split": "train", "loss": 4.0 - s, "accuracy": 0.1 * s} for s in (1, 2)]
        >>> run = Run(Path("a"), get_recipe("memory-horizon"), records, None, {})
        >>> [axes.get_ylabel() for axes in draw_learning_curves(group_runs([run])).axes]
        ['cross-entropy (nats)', 'accuracy']
    """
    regressions = {run.config.task.objective for arm in arms for run in arm.runs} == {"regression"}
    quantities = ERROR if regressions else PANELS
    tasks = {run.config.task for arm in arms for run in arm.runs}
    panels = []
    for quantity, title in quantities:
        lines = [
            style.Line(*_curve(arm, split, quantity), place, kind)
            for place, arm in enumerate(arms)
            for split, kind in SPLITS
        ]
        levels = sorted(filter(None, (_chance(task, quantity) for task in tasks)))
        # errors fall by powers of ten
        panels.append(style.Panel(lines, "", title, levels, log=regressions))
    if not any(line.x for panel in panels for line in panel.lines):
        return None
    panels[-1] = panels[-1]._replace(x="step")
    figure = style.draw_panels(panels, height=3.2, sharex=True)
    if not regressions:
        figure.axes[-1].set_ylim(bottom=0)
    handles = [
        Line2D([], [], linewidth=2.5, label=arm.label, **style.look(place)) for place, arm in enumerate(arms)
    ]
    handles += [
        Line2D([], [], label=split, **{**style.look(0, kind), "color": "black"}) for split, kind in SPLITS
    ]
    style.add_legend(figure, handles)
    return figure


def _curve(arm: Arm, split: str, quantity: str) -> tuple[list[float], list[list[float]]]:
    """Return a quantity that the runs of an arm logged."""
    return style.interpolated(
        [(record["step"], record.get(quantity)) for record in run.metrics if record["split"] == split]
        for run in arm.runs
    )


def _chance(task: Task, quantity: str) -> style.Level | None:
    """Return the score of a guess: uniform over classes, or a constant for real numbers."""
    if task.objective == "regression":
        return style.Level(task.chance, "a constant") if quantity == "loss" else None
    return style.Level(task.chance if quantity == "accuracy" else -math.log(task.chance), "chance")


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
    curves = [
        [result["test"]["span_curve"] for result in arm.results if "span_curve" in result["test"]]
        for arm in arms
    ]
    if not any(curves):
        return None
    chances = sorted({run.config.task.chance for arm in arms for run in arm.runs})
    lines = [
        style.Line(*_in_bins(members), place, label=arm.label)
        for place, (arm, members) in enumerate(zip(arms, curves, strict=True))
        if members
    ]
    panel = style.Panel(lines, "required memory span (numbers since the reset)", "test accuracy")
    figure = style.draw_panels([panel], height=3.7)
    (axes,) = figure.axes
    for chance in chances:
        label = f"chance {chance:.3g}"
        axes.axhline(chance, color=style.GREY, linewidth=1, linestyle=style.DASHED, label=label)
    axes.set_ylim(0, 1.02)
    axes.set_xlim(0, _visible(curves, floor=chances[0] + LEARNED * (1 - chances[0])))
    style.add_legend(figure, axes.lines)
    return figure


def _in_bins(curves: Sequence[dict[str, Any]]) -> tuple[list[float], list[tuple[float, ...]]]:
    # runs of an arm differ in their bins only where the task's seed differs too, and then only far out
    width = curves[0]["width"]
    columns = zip(*(curve["accuracy"] for curve in curves), strict=False)
    present = [(i, column) for i, column in enumerate(columns) if None not in column]
    return [width * i + (width + 1) / 2 for i, _ in present], [column for _, column in present]


def _visible(curves: Sequence[Sequence[dict[str, Any]]], *, floor: float) -> float:
    longest, learned = 0, 0
    for curve in (curve for members in curves for curve in members):
        width = curve["width"]
        longest = max(longest, width * len(curve["accuracy"]))
        for i, (accuracy, count) in enumerate(zip(curve["accuracy"], curve["count"], strict=False)):
            if count >= ENOUGH and accuracy is not None and accuracy > floor:
                learned = max(learned, width * (i + 1))
    return min(longest, 1.4 * learned) if learned else longest


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
        number = next(iter(arm.settings.values()), None)
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            return None
        finite = [score for score, _ in arm.scores if math.isfinite(score)]
        if finite:
            points.append((number, finite, f"{arm.scores[0][1]} {TITLES[arm.metric]}"))
    if len(points) < FEWEST or any(len(arm.settings) > 1 for arm in arms):
        return None
    points.sort(key=lambda point: point[0])
    line = style.Line(range(len(points)), [scores for _, scores, _ in points], 0, "marked")
    name = next(iter(arms[0].settings)).rpartition(".")[2]
    figure = style.draw_panels([style.Panel([line], name, points[0][2])], height=3.2)
    figure.axes[0].set_xticks(line.x, [str(number) for number, _, _ in points])
    return figure


def draw_transitions(layers: Sequence[Layer], resets: Bool[Tensor, "t"]) -> Figure | None:
    """Draw the magnitudes of every layer over time, and their average over channels and layers below.

    Channels are sorted by their average, largest on top. Resets are marked above and below each layer, where
    a mark covers no value, and by lines in the average. On the right, the steps around one reset.

    Args:
        layers: layers of a sequence of t steps, from `linrec.lab.inspection.inspect_model`.
        resets: the steps to mark, shape (t,), bool.

    Returns:
        The picture; None where no layer has transitions.

    Source: GateLoop (Katsch 2023), figure 5.

    Example:
        >>> figure = draw_transitions([Layer("1", torch.rand(1, 20, 4))], torch.arange(20) == 7)
        >>> figure.axes[0].get_ylabel().split("\\n")
        ['layer 1', '4 channels']
    """
    length, marked = len(resets), resets.nonzero()[:, 0].tolist()
    magnitudes = by_layer(layers, length)
    if not magnitudes:
        return None
    n_layers, windows = len(magnitudes), [(0, length)]
    if marked:
        middle = _loneliest(marked, length)
        windows.append((max(0, middle - AROUND), min(length, middle + AROUND + 1)))

    figure = style.make_figure(height=1.3 * n_layers + 1.9)
    widths = [3.2, 1.0][: len(windows)]
    panels = figure.subplots(
        n_layers + 1, len(windows), sharex="col", sharey="row", squeeze=False, width_ratios=widths
    )
    for row, (name, magnitude) in zip(panels, magnitudes.items(), strict=False):
        largest_first = magnitude.mean(0).argsort(descending=True, stable=True)
        for axes in row:
            style.draw_channels(axes, magnitude[:, largest_first].T.numpy(), cmap="viridis", vmin=0, vmax=1)
            _mark_resets(axes, marked)
        row[0].set_ylabel(f"layer {name}\n{magnitude.shape[1]} channels", fontsize=style.LETTERS)
        row[0].set_yticks([])
    for axes, (start, end) in zip(panels[-1], windows, strict=True):
        axes.plot(average(magnitudes).numpy(), color="black", linewidth=1.0)
        for reset in marked:
            axes.axvline(reset, color=RESET, linewidth=0.9, zorder=1.5)
        axes.set_ylim(0, 1)
        style.finish_axes(axes, x="step")
        _mark_resets(axes, marked)
        # last, because ticks widen the limits
        axes.set_xlim(start - 0.5, end - 0.5)
    panels[-1, 0].set_ylabel("average", fontsize=style.LETTERS)
    bar = figure.colorbar(
        panels[0, 0].images[0], ax=panels[:-1, :], location="top", shrink=0.6, aspect=40, pad=0.02
    )
    bar.set_label("magnitude of the state transition |a|", fontsize=style.LETTERS)
    bar.ax.tick_params(labelsize=style.LETTERS - 1)
    return figure


def by_layer(layers: Sequence[Layer], length: int) -> dict[str, Float[Tensor, "t c"]]:
    """Return the magnitudes of the first sequence by layer, without the layers that have no transitions."""
    found = {layer.name: layer.magnitude for layer in layers if layer.magnitude is not None}
    # (b, t, c) where data-controlled, (c,) where fixed
    return {name: magnitude.expand(1, length, -1)[0] for name, magnitude in found.items()}


def average(magnitudes: Mapping[str, Float[Tensor, "t c"]]) -> Float[Tensor, "t"]:
    """Return the average over channels, then over layers."""
    return torch.stack([magnitude.mean(1) for magnitude in magnitudes.values()]).mean(0)


def _loneliest(resets: list[int], length: int) -> int:
    # the reset that is farthest from the next one and from both ends
    def room(reset: int) -> int:
        return min(abs(reset - other) for other in (-1, length, *resets) if other != reset)

    return max(resets, key=room)


def _mark_resets(axes: Axes, resets: list[int]) -> None:
    # a reset keeps its mark where the axis has a tick of its own
    axes.xaxis.remove_overlapping_locs = False
    axes.set_xticks(resets, minor=True)
    axes.tick_params(which="minor", axis="x", top=True, bottom=True, color=RESET, length=4, width=1.4)
