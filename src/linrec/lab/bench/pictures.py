"""Pictures of a suite: learning curves, scores by length, noise and state, speed and memory by length."""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, LogFormatterSciNotation, LogLocator, NullLocator

from linrec.lab.bench.standings import Standing, level
from linrec.lab.bench.variants import short
from linrec.lab.report import style

__all__ = ["Drawing", "drawings"]

# line styles of the baselines
LEVELS = {"chance": "--", "trivial_score": ":"}
AND_LEVELS = "Chance is dashed, the trivial predictor dotted."
# labels of the x axes of probes, by kind
LENGTH = {"length": "length"}
NOISE = {
    "noise": "standard deviation of white noise",
    "salt-and-pepper": "share of pixels made black or white",
}


class Drawing(NamedTuple):
    """A figure with its heading and its caption.

    Args:
        name: name of the picture's file, without suffix.
        title: heading above the figure.
        caption: sentence below the figure.
        figure: the Matplotlib figure.
    """

    name: str
    title: str
    caption: str
    figure: Figure


def drawings(task: str, table: Sequence[Standing]) -> list[Drawing]:
    """Return the drawings of a task, or an empty list if no job of the task is done.

    Args:
        task: name of the suite's entry.
        table: standings from `standings`.
    """
    shown = [standing for standing in table if standing.task == task and standing.rows]
    rows = [row for standing in shown for row in standing.rows]
    if not rows:
        return []
    found, metric = [], rows[0]["metric"]
    # the perplexity of the trivial predictor is many times that of a model
    levels = metric != "perplexity"
    and_levels = f" {AND_LEVELS}" * levels
    if any(row["curve"] for row in rows):
        # perplexity is a function of the loss, so the loss panel is enough
        panels = [_panel(_curve(1), "step", "validation loss")]
        if metric == "accuracy":
            panels.append(_panel(_curve(2), "step", "validation accuracy", levels=True))
        elif metric == "mse":
            panels = [_panel(_curve(1), "step", "validation mse", levels=True, log=True)]
        caption = "Scores on the validation split during training: mean over seeds, and lowest to highest."
        found.append(Drawing("curves", "learning curves", caption + and_levels, _figure(shown, panels)))
    for name, title, kinds, on in (
        ("lengths", "score by length", LENGTH, "samples of lengths other than the training length"),
        (
            "noise",
            "score by noise",
            NOISE,
            "test images without noise (0) and with noise; training is without noise",
        ),
    ):
        panels = [
            _panel(_probes(kind), x, metric, ticks=ticks, levels=levels)
            for kind, x in kinds.items()
            if len(ticks := {tick for standing in shown for tick in standing.probes.get(kind, ())}) > 1
        ]
        if panels:
            found.append(Drawing(name, title, f"Score on {on}.{and_levels}", _figure(shown, panels)))
    if len(shown) > 1:
        caption = (
            "Score of every seed by the number of elements in the state at the end of a sequence. The state "
            f"of attention is its whole cache.{and_levels}"
        )
        panel = _panel(_draw_state, "state size", metric, ticks={*map(_state, shown)}, levels=levels)
        found.append(Drawing("states", "score by state size", caption, _figure(shown, [panel], points=True)))
    if speeds := [found for row in rows for found in row["speed_by_length"] or ()]:
        caption = (
            "Training steps on random inputs, without torch.compile, with the same number of tokens per "
            "batch: mean over seeds, and lowest to highest. Jobs that shared a device slowed each other. "
            "Memory is the peak memory of a step, excluding model and optimiser."
        )
        lengths = {speed["length"] for speed in speeds}
        panels = [_panel(_by_length("tokens_per_second", 1), "length", "tokens/s", ticks=lengths, log=True)]
        if any(speed["step_bytes"] is not None for speed in speeds):
            memory = _by_length("step_bytes", 2**20)
            panels.append(_panel(memory, "length", "MiB of a step", ticks=lengths, log=True))
        found.append(Drawing("speed", "speed and memory by length", caption, _figure(shown, panels)))
    return [
        # a file's name has no slash
        drawing._replace(name=f"{task.replace('/', '-')}-{drawing.name}", title=f"{task}: {drawing.title}")
        for drawing in found
    ]


Draw = Callable[[Axes, Standing, int], None]


class _Panel(NamedTuple):
    """A part of a picture; its x axis has ticks at `ticks`, and is logarithmic if they are positive."""

    draw: Draw
    x: str
    y: str
    ticks: Collection[float]
    levels: bool
    log: bool


def _panel(
    draw: Draw, x: str, y: str, *, ticks: Collection[float] = (), levels: bool = False, log: bool = False
) -> _Panel:
    return _Panel(draw, x, y, ticks, levels, log)


def _apart(ticks: Collection[float], place: Callable[[float], float]) -> list[float]:
    """Return the ticks whose labels do not overlap, on an axis with `place`: `math.log` or `float`.

    Example:
        >>> _apart([11664, 4608, 144, 4864], math.log)
        [144, 4608, 11664]
    """
    room = (place(max(ticks)) - place(min(ticks))) / 7
    kept: list[float] = []
    for tick in sorted(set(ticks)):
        if not kept or place(tick) - place(kept[-1]) >= room:
            kept.append(tick)
    return kept


def _figure(shown: Sequence[Standing], panels: Sequence[_Panel], *, points: bool = False) -> Figure:
    """Draw every mixer in every panel, as lines or `points`; panels are stacked, for narrow screens."""
    figure = style.make_figure(height=2.9 * len(panels))
    rows = [row for standing in shown for row in standing.rows]
    for panel, axes in zip(panels, figure.subplots(len(panels), squeeze=False)[:, 0], strict=True):
        for place, standing in enumerate(shown):
            panel.draw(axes, standing, place)
        style.finish_axes(axes, x=panel.x, y=panel.y)
        if panel.ticks:
            positive = min(panel.ticks) > 0
            axes.set_xscale("log" if positive else "linear")
            axes.minorticks_off()
            ticks = _apart(panel.ticks, math.log if positive else float)
            axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        if panel.log:
            axes.set_yscale("log")
            lowest, highest = axes.get_ylim()
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if highest / lowest < 100 else (1,)))
            axes.yaxis.set_major_formatter(
                EngFormatter(sep="") if highest > 1000 else LogFormatterSciNotation()
            )
            axes.yaxis.set_minor_locator(NullLocator())
        for name, dashes in LEVELS.items() if panel.levels else ():
            if (value := level(rows, shown[0].task, name)) is not None:
                axes.axhline(value, color=style.GREY, linestyle=dashes, linewidth=1)
    handles = [
        Line2D(
            [],
            [],
            color=style.colour(place),
            linestyle="" if points else style.dashes(place),
            marker=style.point(place) if points else "",
            label=short(standing.mixer),
        )
        for place, standing in enumerate(shown)
    ]
    style.add_legend(figure, handles)
    return figure


def _curve(column: int) -> Draw:
    """Return a function that draws a column of the learning curves: 1 for the loss, 2 for the accuracy."""

    def draw(axes: Axes, standing: Standing, place: int) -> None:
        curves = [row["curve"] for row in standing.rows if row["curve"]]
        # a run that ended early has fewer points than the others
        steps = [point[0] for point in min(curves, key=len, default=[])]
        # a file of others may lack an accuracy
        values = [
            [math.nan if point[column] is None else point[column] for point in curve[: len(steps)]]
            for curve in curves
        ]
        _draw(axes, steps, values, place)

    return draw


def _by_length(name: str, unit: float) -> Draw:
    """Return a function that draws a measurement by length, at the lengths that every seed has."""

    def draw(axes: Axes, standing: Standing, place: int) -> None:
        seeds: list[dict[int, Any]] = [
            {speed["length"]: speed[name] for speed in row["speed_by_length"] or ()} for row in standing.rows
        ]
        lengths = [length for length in seeds[0] if all(seed.get(length) is not None for seed in seeds)]
        values = [[seed[length] / unit for length in lengths] for seed in seeds]
        _draw(axes, lengths, values, place, marker=style.point(place))

    return draw


def _probes(kind: str) -> Draw:
    """Return a function that draws the scores on a kind of probe."""

    def draw(axes: Axes, standing: Standing, place: int) -> None:
        if scores := standing.probes.get(kind):
            seeds = [list(of_seed) for of_seed in zip(*scores.values(), strict=True)]
            _draw(axes, [*scores], seeds, place)

    return draw


def _draw_state(axes: Axes, standing: Standing, place: int) -> None:
    sizes = [_state(standing)] * len(standing.scores)
    axes.plot(sizes, standing.scores, style.point(place), color=style.colour(place), alpha=0.8)


def _draw(
    axes: Axes,
    x: Sequence[float],
    rows: Sequence[Sequence[float]],
    place: int,
    marker: style.Marker = "",
) -> None:
    columns = zip(*rows, strict=True)
    style.draw_mean_and_range(
        axes, x, columns, colour=style.colour(place), style=style.dashes(place), marker=marker
    )


def _state(standing: Standing) -> int:
    # an empty state is drawn at 1, because a logarithmic axis has no 0
    return max(1, standing.state)
