"""How results look: scores with their mean and spread over seeds, and pictures.

Pictures have one size and legible letters, and colours that colour-blind readers tell apart.
"""

import math
import statistics
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, LogFormatterSciNotation, LogLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray

from linrec.files import replacing

FORMATS = {"accuracy": ",.3f", "auc": ",.3f", "mse": ",.6f", "perplexity": ",.2f", "loss": ",.3f"}
"""How scores are written, mean and spread alike, by metric; "loss" is in nats."""


TITLES = {
    "accuracy": "accuracy",
    "auc": "area under the curve",
    "mse": "mean squared error",
    "perplexity": "perplexity",
}
# metrics that are scores themselves; others follow from the loss, and less is better
HIGHER_IS_BETTER = ("accuracy", "auc")


LineStyle: TypeAlias = Literal["-", ":", "--"]
Dashes: TypeAlias = tuple[int, tuple[int, ...]]
Kind: TypeAlias = Literal["line", "dotted", "marked", "points"]
"""How an arm is drawn: "marked" is a line with points, "points" has a point for each seed and no line."""

# Okabe and Ito's palette without its yellow, which is too light for lines on white
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555")
GREY = "#767676"
DASHED: Dashes = (0, (5, 3))
# a narrow picture stays legible when a phone shows it at the width of its screen
WIDTH_INCHES = 5.6
LETTERS = 10
# at this resolution each step of a sequence of 1,024 has a pixel of its own
DOTS_PER_INCH = 300


def score_of(metric: str, result: Mapping[str, Any]) -> tuple[float, str] | None:
    """Return the score of a result and the name of its split: the test split, or validation without that.

    None stands for a score that is missing or null. `metric` is that of `linrec.lab.tasks.judged_by`.
    """
    split = next((name for name in ("test", "validation") if result.get(name)), None)
    if split is None:
        return None
    score = score_in(metric, result[split])
    return None if score is None else (score, split)


def score_name(metric: str) -> str:
    """Return the name of a metric's number among the scores of a split."""
    return metric if metric in HIGHER_IS_BETTER else "loss"


def score_in(metric: str, scores: Mapping[str, Any]) -> float | None:
    """Return the score of a split, or None if it is missing or null."""
    score: float | None = scores.get(score_name(metric))
    # the exponential of more overflows
    return math.exp(min(score, 700)) if metric == "perplexity" and score is not None else score


def better(metric: str, score: float, other: float) -> bool:
    """Return whether a score is better than another; higher accuracies and lower errors are better."""
    return score > other if metric in HIGHER_IS_BETTER else score < other


class MeanAndSpread(NamedTuple):
    """The mean, and the standard deviation of a sample with n - 1, which is None for a single seed."""

    mean: float
    spread: float | None


def mean_and_spread(values: Sequence[float]) -> MeanAndSpread:
    """Return mean and standard deviation of at least one value."""
    if not all(map(math.isfinite, values)):
        # `fmean` and `stdev` raise for some of these
        return MeanAndSpread(sum(values) / len(values), None if len(values) == 1 else math.nan)
    return MeanAndSpread(statistics.fmean(values), None if len(values) == 1 else statistics.stdev(values))


def format_mean_and_spread(values: Sequence[float], mean_format: str = ",.3f") -> str:
    """Return "mean ± standard deviation", "mean (1 seed)", or a dash for no value."""
    if not values:
        return "–"
    mean, spread = mean_and_spread(values)
    written = format(mean, mean_format)
    if spread is None:
        return f"{written} (1 seed)"
    return f"{written} ± {format(spread, mean_format)}"


def colour(arm: int) -> str:
    """Return the colour of arm number `arm`; after seven arms they repeat."""
    return COLOURS[arm % len(COLOURS)]


def look(arm: int, kind: Kind = "line") -> dict[str, Any]:
    """Return the colour, the line and the point of an arm; arms of one colour differ in the last two."""
    dashes, point = ("-", "o") if arm < len(COLOURS) else ("--", "s")
    linestyle = {"dotted": ":", "points": ""}.get(kind, dashes)
    marker = point if kind in ("marked", "points") else ""
    return {"color": colour(arm), "linestyle": linestyle, "marker": marker}


def make_figure(height: float) -> Figure:
    """Return an empty figure of the common width and of `height` inches, outside pyplot's global state."""
    return Figure(figsize=(WIDTH_INCHES, height), dpi=DOTS_PER_INCH, layout="constrained")


def finish_axes(axes: Axes, *, x: str = "", y: str = "") -> None:
    """Label the axes, and leave out the lines that tell nothing."""
    axes.set_xlabel(x, fontsize=LETTERS)
    axes.set_ylabel(y, fontsize=LETTERS)
    axes.tick_params(labelsize=LETTERS - 1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True, steps=[1, 2, 5, 10]))
    axes.grid(color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)


class Line(NamedTuple):
    """The values of an arm's seeds at each `x`: drawn as their mean, and from lowest to highest as a band."""

    x: Sequence[float]
    columns: Sequence[Sequence[float]]
    arm: int
    kind: Kind = "line"
    label: str = ""


class Level(NamedTuple):
    """A value that a horizontal line marks, with its name above the right end."""

    value: float
    name: str = ""
    style: LineStyle | Dashes = DASHED


class Panel(NamedTuple):
    """Lines over one another; an x axis with `ticks` is logarithmic if these are positive."""

    lines: Sequence[Line]
    x: str
    y: str
    levels: Sequence[Level] = ()
    ticks: Collection[float] = ()
    log: bool = False


def draw_panels(panels: Sequence[Panel], *, height: float, sharex: bool = False) -> Figure:
    """Return a figure of panels below each other, for narrow screens, each `height` inches high."""
    figure = make_figure(height * len(panels))
    stacked = figure.subplots(len(panels), 1, squeeze=False, sharex=sharex)[:, 0]
    for panel, axes in zip(panels, stacked, strict=True):
        for line in panel.lines:
            if line.x:
                _draw_line(axes, line)
        finish_axes(axes, x=panel.x, y=panel.y)
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
        for level in panel.levels:
            mark_level(axes, level)
    return figure


def interpolated(
    curves: Iterable[Sequence[tuple[float, float | None]]],
) -> tuple[list[float], list[list[float]]]:
    """Return the steps that all curves have, and the values of all curves at each of these steps.

    Curves have points (step, value) in order; values between are interpolated linearly. Values that are None
    or not finite, and curves without values, are left out.
    """
    finite = ([(x, y) for x, y in curve if y is not None and math.isfinite(y)] for curve in curves)
    series = [np.array(curve, dtype=float).T for curve in finite if curve]
    if not series:
        return [], []
    first, last = max(steps[0] for steps, _ in series), min(steps[-1] for steps, _ in series)
    grid = np.unique(np.concatenate([steps for steps, _ in series]))
    grid = grid[(grid >= first) & (grid <= last)]
    values = [np.interp(grid, steps, values) for steps, values in series]
    return grid.tolist(), np.transpose(values).tolist()


def _draw_line(axes: Axes, line: Line) -> None:
    drawn = look(line.arm, line.kind)
    if line.kind == "points":
        for x, column in zip(line.x, line.columns, strict=True):
            axes.plot([x] * len(column), column, alpha=0.8, **drawn)
        return
    means = [mean_and_spread(column).mean for column in line.columns]
    axes.plot(line.x, means, linewidth=1.6, label=line.label, **drawn)
    if any(len(column) > 1 for column in line.columns):
        lowest, highest = [*map(min, line.columns)], [*map(max, line.columns)]
        axes.fill_between(line.x, lowest, highest, color=colour(line.arm), alpha=0.2, linewidth=0)


def _apart(ticks: Collection[float], place: Callable[[float], float]) -> list[float]:
    """Return the ticks whose labels do not overlap, on an axis with `place`: `math.log` or `float`."""
    room = (place(max(ticks)) - place(min(ticks))) / 7
    kept: list[float] = []
    for tick in sorted(set(ticks)):
        if not kept or place(tick) - place(kept[-1]) >= room:
            kept.append(tick)
    return kept


def draw_channels(axes: Axes, values: NDArray[np.floating], **colours: Any) -> AxesImage:
    """Draw values (channels, steps) as colours, the first channel on top."""
    channels, length = values.shape
    extent = (-0.5, length - 0.5, channels, 0)
    return axes.imshow(values, aspect="auto", interpolation="nearest", extent=extent, **colours)


def mark_level(axes: Axes, level: Level) -> None:
    """Draw a level across the axes."""
    axes.axhline(level.value, color=GREY, linestyle=level.style, linewidth=1)
    if level.name:
        axes.annotate(
            level.name,
            (1, level.value),
            xycoords=("axes fraction", "data"),
            xytext=(0, 2),
            textcoords="offset points",
            ha="right",
            va="bottom",
            color=GREY,
            fontsize=LETTERS - 1,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
            # below the curves
            zorder=1,
        )


def add_legend(figure: Figure, handles: Sequence[Line2D]) -> None:
    """Put a legend above the axes, at most as wide as the picture; longer labels break at spaces."""
    canvas = FigureCanvasAgg(figure)

    def width() -> float:
        return legend.get_window_extent(canvas.get_renderer()).width / figure.bbox.width

    for n_columns in range(min(4, len(handles)), 0, -1):
        legend = figure.legend(
            handles=handles, loc="outside upper center", ncols=n_columns, frameon=False, fontsize=LETTERS
        )
        texts = legend.get_texts()
        for text in texts:
            # a dollar sign in a name begins no formula
            text.set_parse_math(False)
        if n_columns == 1 or width() <= 1:
            break
        legend.remove()
    labels = [text.get_text() for text in texts]
    longest = max(map(len, labels))
    while (wide := width()) > 1:
        longest = int(longest / wide)
        for text, label in zip(texts, labels, strict=True):
            text.set_text(textwrap.fill(label, longest, break_on_hyphens=False))
    lines = [text.get_text().count("\n") + 1 for text in texts]
    # matplotlib fills one column after the other
    n_rows = -(-len(lines) // n_columns) if max(lines, default=1) == 1 else sum(lines)
    figure.set_figheight(figure.get_figheight() + 0.2 * n_rows)


def save(figure: Figure, path: Path) -> Path:
    """Write the picture as PNG, whole or not at all, and return its path."""
    with replacing(path) as partial:
        # no software version inside: the same data makes the same file
        figure.savefig(partial, format="png", metadata={"Software": None})
    return path
