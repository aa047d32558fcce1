"""`report.html` of a suite: a single page with all results, readable without network access."""

import json
import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, LogFormatterSciNotation, LogLocator, NullLocator

from linrec.files import make_subfolder, write_text
from linrec.lab.bench.jobs import equally_many
from linrec.lab.bench.rows import Standing, level, standings
from linrec.lab.bench.variants import short
from linrec.lab.report import style
from linrec.lab.report.pages import Picture, render
from linrec.lab.report.records import learns
from linrec.lab.report.scores import FORMATS, better, mean_and_spread

PAGE = "report.html"
PICTURES = "pictures"
NUMBERS = ("score", "±", "chance", "trivial", "longest", "seeds", "parameters", "state", "tokens/s", "MiB")
HEAD = ("task", "mixer", *NUMBERS[:2], "metric", *NUMBERS[2:], "job")
STREAM_NUMBERS = (
    *("loss", "±", "at the end", "bound", "recovery", "retained", "seeds", "parameters", "KiB carried"),
    *("KiB in a chunk", "µs/step early", "µs/step late"),
)
STREAM_HEAD = ("stream", "learner", *STREAM_NUMBERS[:2], "metric", *STREAM_NUMBERS[2:], "job")
ON_STREAMS = (
    "Loss is the mean over the stream, each step predicted before it is learnt. Bound is the loss of a "
    "predictor without memory. Recovery counts the steps after a drift until the loss is within a tenth of "
    "where the regime ends, and retained is the share of what was learnt that is left when a regime returns. "
    "Early is at step 1,000."
)
# line styles of the baselines
LEVELS = {"chance": "--", "trivial_score": ":"}
AND_LEVELS = "Chance is dashed, the trivial predictor dotted."
# labels of the x axes of probes, by kind
LENGTH = {"length": "length"}
NOISE = {
    "noise": "standard deviation of white noise",
    "salt-and-pepper": "share of pixels made black or white",
}


def write_page(rows: Sequence[dict[str, Any]], out: Path, *, title: str) -> Path:
    """Write `report.html` and its pictures; return the page.

    Args:
        rows: rows from `make_rows`.
        out: folder of the suite.
        title: heading of the page.

    Raises:
        OSError: the files cannot be written, for example because the disk is full.
    """
    table = standings(rows)
    tasks = dict.fromkeys(standing.task for standing in table)
    pictures = make_subfolder(out, PICTURES)
    drawn = [
        [
            Picture(style.save(figure, pictures / f"{name}.png"), heading, caption)
            for name, heading, caption, figure in drawings(task, table)
        ]
        for task in tasks
    ]
    devices = sorted({device["name"] for row in rows if "name" in (device := row.get("device") or {})})
    bad = [row for row in rows if row["status"] not in ("done", "not run")]
    sentences = [f"{row['folder']}: {row['status']}: {row['message']}" for row in bad]
    if left := sum(row["status"] == "not run" for row in rows):
        sentences.append(f"Jobs that have not been run: {left}; the command of the suite runs them.")
    sentences += [*filter(None, (_unequal(task, table) for task in tasks))]
    of_streams = bool(rows) and all(learns(row["config"]) for row in rows)
    if of_streams:
        sentences.append(ON_STREAMS)
    page = render(
        "suite.html",
        title=title,
        program="",
        ended=sum(row["status"] == "done" for row in rows),
        of_all=len(rows),
        devices=", ".join(devices),
        sentences=sentences,
        head=STREAM_HEAD if of_streams else HEAD,
        numbers=STREAM_NUMBERS if of_streams else NUMBERS,
        leaderboard=[
            _line(standing, _stream_cells(standing) if of_streams else _cells(standing, rows))
            for standing in table
        ],
        pictures=drawn,
    )
    write_text(out / PAGE, page)
    return out / PAGE


def _unequal(task: str, table: Sequence[Standing]) -> str:
    """Return a sentence on a task's smallest and largest model, or "" if they are about equally large."""
    sizes = [(standing.parameters, standing.mixer) for standing in table if standing.task == task]
    known = sorted((n, mixer) for n, mixer in sizes if n is not None)
    if not known or equally_many(known[0][0], known[-1][0]):
        return ""
    (fewest, smallest), (most, largest) = known[0], known[-1]
    return f"{task}: equal parameters: {smallest} has {fewest:,} parameters, {largest} has {most:,}."


class _Cell(NamedTuple):
    """A cell of the leaderboard: its text, its class in CSS, and the value that it is sorted by."""

    text: str
    kind: str = "number"
    value: float | str | None = ""


def _number(value: float | None, form: str = "", after: str = "", missing: str = "") -> _Cell:
    return _Cell(missing) if value is None else _Cell(f"{format(value, form)}{after}", value=value)


def _line(standing: Standing, cells: Sequence[_Cell]) -> dict[str, Any]:
    """Return the values of a line of the leaderboard, for the template."""
    first = (standing.rows or standing.failed)[0]
    told = {"task": standing.task, "mixer": standing.mixer, "seed": first["seed"], "cells": cells}
    return {**told, "command": first["command"], "config": json.dumps(first["config"], indent=1)}


def _cells(standing: Standing, of_all: Sequence[dict[str, Any]]) -> list[_Cell]:
    """Return the cells of a mixer on a task."""
    chance, trivial = (level(of_all, standing.task, name) for name in ("chance", "trivial_score"))
    scores, rows, form = standing.scores, standing.rows, FORMATS[standing.metric]
    spread, longest = None, _Cell("")
    if rows:
        score, spread = mean_and_spread(scores)
        reached = _number(score, form)
        if trivial is not None and not better(standing.metric, score, trivial):
            reached = reached._replace(kind="number soft")
    else:
        reached = _Cell(", ".join(dict.fromkeys(row["status"] for row in standing.failed)))
    if by_length := standing.probes.get("length"):
        length, of_length = max(by_length.items())
        longest = _number(mean_and_spread(of_length).mean, form, after=f" at {length:,}")
    return [
        reached,
        _number(spread, form, missing="1 seed" if len(rows) == 1 else ""),
        _Cell(standing.metric, "", None),
        _number(chance, ".3g"),
        _number(trivial, form),
        longest,
        _number(len(rows) or None, "d", after="" if len(rows) == standing.seeds else f" of {standing.seeds}"),
        _number(standing.parameters, ",d"),
        _number(standing.state if rows else None, ",d"),
        _number(_mean([row["tokens_per_second"] for row in rows]), ",.0f"),
        _number(_mean([_memory(row) for row in rows]), ",.0f"),
    ]


def _stream_cells(standing: Standing) -> list[_Cell]:
    """Return the cells of a learner on a stream."""
    rows, form = standing.rows, FORMATS[standing.metric]
    if not rows:
        reached = _Cell(", ".join(dict.fromkeys(row["status"] for row in standing.failed)))
        return [reached, *(_Cell("") for _ in range(len(STREAM_HEAD) - 4))]
    found, (score, spread) = [row["stream"] for row in rows], mean_and_spread(standing.scores)
    bound = level(rows, standing.task, "trivial_score")
    chunks = [row["speed_by_length"][0]["step_bytes"] if row["speed_by_length"] else None for row in rows]
    speeds = [[row["at"][place]["microseconds_per_step"] for row in found if row["at"]] for place in (0, -1)]
    return [
        _number(score, form)._replace(
            kind="number soft" if bound is not None and score > bound else "number"
        ),
        _number(spread, form, missing="1 seed"),
        _Cell(standing.metric, "", None),
        _number(_mean([row["fading"] for row in found]), form),
        _number(bound, form),
        _number(_mean([row["recovery"] for row in found]), ",.0f"),
        _number(_mean([row["retained"] for row in found]), ".2f"),
        _number(len(rows), "d", after="" if len(rows) == standing.seeds else f" of {standing.seeds}"),
        _number(standing.parameters, ",d"),
        _number(_mean([row["memory_bytes"] / 1024 for row in found]), ",.1f"),
        _number(_mean([None if most is None else most / 1024 for most in chunks]), ",.0f"),
        *(_number(_mean(speed), ",.0f") for speed in speeds),
    ]


def _memory(row: dict[str, Any]) -> float | None:
    """Return a job's peak memory in MiB: device memory if the device has its own, else process memory."""
    peak = row["peak_bytes"] or {"device": None, "process": None}
    most = peak["device"] or peak["process"]
    return None if most is None else most / 2**20


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean_and_spread(known).mean if known else None


class Drawing(NamedTuple):
    """A figure with the name of its file, without suffix, its heading and its caption."""

    name: str
    title: str
    caption: str
    figure: Figure


def drawings(task: str, table: Sequence[Standing]) -> list[Drawing]:
    """Return the drawings of a task from the standings, or an empty list if no job of the task is done."""
    shown = [standing for standing in table if standing.task == task and standing.rows]
    rows = [row for standing in shown for row in standing.rows]
    if not rows:
        return []
    found, metric = [], rows[0]["metric"]
    # the perplexity of the trivial predictor is many times that of a model
    levels = metric != "perplexity"
    and_levels = f" {AND_LEVELS}" * levels
    if "stream" in rows[0]:
        return [_stream_drawing(task, shown, rows[0]["stream"], metric)]
    if any(row["curve"] for row in rows):
        # perplexity is a function of the loss, so the loss panel is enough
        panels = [_Panel(_curve(1), "step", "validation loss")]
        if metric == "accuracy":
            panels.append(_Panel(_curve(2), "step", "validation accuracy", levels=True))
        elif metric == "mse":
            panels = [_Panel(_curve(1), "step", "validation mse", levels=True, log=True)]
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
            _Panel(_probes(kind), x, metric, ticks=ticks, levels=levels)
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
        panel = _Panel(_draw_state, "state size", metric, ticks={*map(_state, shown)}, levels=levels)
        found.append(Drawing("states", "score by state size", caption, _figure(shown, [panel], points=True)))
    if speeds := [found for row in rows for found in row["speed_by_length"] or ()]:
        caption = (
            "Training steps on random inputs, without torch.compile, with the same number of tokens per "
            "batch: mean over seeds, and lowest to highest. Jobs that shared a device slowed each other. "
            "Memory is the peak memory of a step, excluding model and optimiser."
        )
        lengths = {speed["length"] for speed in speeds}
        panels = [_Panel(_by_length("tokens_per_second", 1), "length", "tokens/s", ticks=lengths, log=True)]
        if any(speed["step_bytes"] is not None for speed in speeds):
            memory = _by_length("step_bytes", 2**20)
            panels.append(_Panel(memory, "length", "MiB of a step", ticks=lengths, log=True))
        found.append(Drawing("speed", "speed and memory by length", caption, _figure(shown, panels)))
    return [
        # a file's name has no slash
        drawing._replace(name=f"{task.replace('/', '-')}-{drawing.name}", title=f"{task}: {drawing.title}")
        for drawing in found
    ]


def _stream_drawing(task: str, shown: Sequence[Standing], scored: dict[str, Any], metric: str) -> Drawing:
    """Return the drawing of losses over time, with the drifts and the bounds of the stream."""
    panel = _Panel(_curve(1), "step", f"{metric} in windows", log=metric == "mse")
    figure = _figure(shown, [panel])
    (axes,) = figure.axes
    for start, _ in scored["regimes"][1:]:
        axes.axvline(start, color=style.GREY, linestyle=":", linewidth=1)
    for name, loss in scored["bounds"].items():
        axes.axhline(loss, color=style.GREY, linestyle="--", linewidth=1)
        axes.annotate(
            name,
            (1, loss),
            xycoords=("axes fraction", "data"),
            horizontalalignment="right",
            verticalalignment="bottom",
            fontsize=style.LETTERS - 2,
            color=style.GREY,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
            # below the curves
            zorder=1,
        )
    drifts = " Dotted lines are drifts." if len(scored["regimes"]) > 1 else ""
    caption = (
        f"Loss before learning: mean over seeds, and lowest to highest.{drifts} Dashed lines are bounds of "
        "the first seed's stream."
    )
    return Drawing(f"{task}-curves", f"{task}: loss over time", caption, figure)


Draw = Callable[[Axes, Standing, int], None]


class _Panel(NamedTuple):
    """A part of a picture; its x axis has ticks at `ticks`, and is logarithmic if they are positive."""

    draw: Draw
    x: str
    y: str
    ticks: Collection[float] = ()
    levels: bool = False
    log: bool = False


def _apart(ticks: Collection[float], place: Callable[[float], float]) -> list[float]:
    """Return the ticks whose labels do not overlap, on an axis with `place`: `math.log` or `float`."""
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
