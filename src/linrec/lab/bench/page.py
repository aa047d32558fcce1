"""`report.html` of a suite: a single page with all results, readable without network access."""

import json
import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, LogFormatterSciNotation, LogLocator, NullLocator

from linrec.files import make_subfolder, write_text
from linrec.lab import style
from linrec.lab.bench.jobs import equally_many
from linrec.lab.bench.rows import Standing, level, standings
from linrec.lab.bench.variants import short
from linrec.lab.pages import Drawing, render, save_pictures
from linrec.lab.report.records import learns
from linrec.lab.style import FORMATS, better, mean_and_spread

PAGE = "report.html"
PICTURES = "pictures"
# line styles of the baselines
LEVELS: dict[str, style.LineStyle] = {"chance": "--", "trivial_score": ":"}
AND_LEVELS = "Chance is dashed, the trivial predictor dotted."
ON_CURVES = "Scores on the validation split during training: mean over seeds, and lowest to highest."
ON_STATES = (
    "Score of every seed by the number of elements in the state at the end of a sequence. The state of "
    "attention is its whole cache."
)
ON_SPEED = (
    "Training steps on random inputs, without torch.compile, with the same number of tokens per batch: mean "
    "over seeds, and lowest to highest. Jobs that shared a device slowed each other. Memory is the peak "
    "memory of a step, excluding model and optimiser."
)
# pictures of probes: title, caption, and the label of the x axis of each kind of probe
PROBES = {
    "lengths": (
        "score by length",
        "Score on samples of lengths other than the training length.",
        {"length": "length"},
    ),
    "noise": (
        "score by noise",
        "Score on test images without noise (0) and with noise; training is without noise.",
        {
            "noise": "standard deviation of white noise",
            "salt-and-pepper": "share of pixels made black or white",
        },
    ),
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
    drawn = [save_pictures(drawings(task, table), pictures) for task in tasks]
    devices = sorted({device["name"] for row in rows if "name" in (device := row.get("device") or {})})
    bad = [row for row in rows if row["status"] not in ("done", "not run")]
    sentences = [f"{row['folder']}: {row['status']}: {row['message']}" for row in bad]
    if left := sum(row["status"] == "not run" for row in rows):
        sentences.append(f"Jobs that have not been run: {left}; the command of the suite runs them.")
    on_streams = bool(rows) and all(learns(row["config"]) for row in rows)
    if not on_streams:
        sentences += [*filter(None, (_unequal(task, table) for task in tasks))]
    page = render(
        "suite.html",
        title=title,
        program="",
        ended=sum(row["status"] == "done" for row in rows),
        of_all=len(rows),
        devices=", ".join(devices),
        sentences=sentences,
        on_streams=on_streams,
        leaderboard=[_line(standing, rows) for standing in table],
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


def _line(standing: Standing, of_all: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a line of the leaderboard, for the template."""
    first = (standing.rows or standing.failed)[0]
    return {
        "cells": _cells(standing, of_all, learns(first["config"])),
        "seed": first["seed"],
        "command": first["command"],
        "config": json.dumps(first["config"], indent=1),
    }


def _cells(standing: Standing, of_all: Sequence[dict[str, Any]], streams: bool) -> dict[str, _Cell]:
    """Return the cells of a mixer on a task, or of a learner on a stream, by the heading of their column."""
    rows, form, spread = standing.rows, FORMATS[standing.metric], None
    chance, trivial = (level(of_all, standing.task, name) for name in LEVELS)
    reached = _Cell(", ".join(dict.fromkeys(row["status"] for row in standing.failed)))
    if rows:
        score, spread = mean_and_spread(standing.scores)
        beaten = trivial is None or better(standing.metric, score, trivial)
        reached = _number(score, form)._replace(kind="number" if beaten else "number soft")
    scored = {
        "±": _number(spread, form, missing="1 seed" if len(rows) == 1 else ""),
        "metric": _Cell(standing.metric, "", None),
    }
    some = "" if len(rows) == standing.seeds else f" of {standing.seeds}"
    sized = {
        "seeds": _number(len(rows) or None, "d", after=some),
        "parameters": _number(standing.parameters, ",d"),
    }
    task, name = _Cell(standing.task, "", None), _Cell(standing.mixer, "label", None)
    if streams:
        found = [row["stream"] for row in rows]
        chunks = [row["speed_by_length"][0]["step_bytes"] for row in rows if row["speed_by_length"]]
        early, late = ([of["at"][place] for of in found if of["at"]] for place in (0, -1))
        return {
            **{"stream": task, "learner": name, "loss": reached, **scored},
            "at the end": _mean([of["fading"] for of in found], form),
            "bound": _number(trivial, form),
            "recovery": _mean([of["recovery"] for of in found], ",.0f"),
            "retained": _mean([of["retained"] for of in found], ".2f"),
            **sized,
            "KiB carried": _mean([of["memory_bytes"] for of in found], ",.1f", unit=1024),
            "KiB in a chunk": _mean(chunks, ",.0f", unit=1024),
            "µs/step early": _mean([of["microseconds_per_step"] for of in early], ",.0f"),
            "µs/step late": _mean([of["microseconds_per_step"] for of in late], ",.0f"),
        }
    longest, of_longest = max(standing.probes.get("length", {0: ()}).items())
    return {
        **{"task": task, "mixer": name, "score": reached, **scored},
        "chance": _number(chance, ".3g"),
        "trivial": _number(trivial, form),
        "longest": _mean(of_longest, form, after=f" at {longest:,}"),
        **sized,
        "state": _number(standing.state if rows else None, ",d"),
        "tokens/s": _mean([row["tokens_per_second"] for row in rows], ",.0f"),
        "MiB": _mean([_memory(row) for row in rows], ",.0f", unit=2**20),
    }


def _mean(values: Sequence[float | None], form: str, *, unit: float = 1, after: str = "") -> _Cell:
    known = [value / unit for value in values if value is not None]
    return _number(mean_and_spread(known).mean if known else None, form, after)


def _memory(row: dict[str, Any]) -> float | None:
    """Return a job's peak memory in bytes: device memory if the device has its own, else process memory."""
    peak = row["peak_bytes"] or {"device": None, "process": None}
    return peak["device"] or peak["process"]


def drawings(task: str, table: Sequence[Standing]) -> list[Drawing]:
    """Return the drawings of a task from the standings, or an empty list if no job of the task is done."""
    shown = [standing for standing in table if standing.task == task and standing.rows]
    rows = [row for standing in shown for row in standing.rows]
    if not rows:
        return []
    metric = rows[0]["metric"]
    if "stream" in rows[0]:
        return [_stream_drawing(task, shown, rows[0]["stream"], metric)]
    # the perplexity of the trivial predictor is many times that of a model
    levels = metric != "perplexity"
    found: list[Drawing] = []

    def add(name: str, title: str, caption: str, panels: Sequence[_Panel]) -> None:
        caption += f" {AND_LEVELS}" * (levels and any(panel.levels for panel in panels))
        # a file's name has no slash
        file = f"{task.replace('/', '-')}-{name}"
        found.append(Drawing(file, f"{task}: {title}", caption, _figure(shown, panels)))

    if any(row["curve"] for row in rows):
        # perplexity is a function of the loss, so the loss panel is enough
        panels = [_Panel(partial(_curve, column=1), "step", "validation loss")]
        if metric == "accuracy":
            panels.append(_Panel(partial(_curve, column=2), "step", "validation accuracy", levels=True))
        elif metric == "mse":
            panels = [_Panel(partial(_curve, column=1), "step", "validation mse", levels=True, log=True)]
        add("curves", "learning curves", ON_CURVES, panels)
    for name, (title, caption, kinds) in PROBES.items():
        panels = [
            _Panel(partial(_probes, kind=kind), x, metric, ticks=ticks, levels=levels)
            for kind, x in kinds.items()
            if len(ticks := {tick for standing in shown for tick in standing.probes.get(kind, ())}) > 1
        ]
        if panels:
            add(name, title, caption, panels)
    if len(shown) > 1:
        panel = _Panel(_states, "state size", metric, ticks={*map(_state, shown)}, levels=levels, points=True)
        add("states", "score by state size", ON_STATES, [panel])
    if speeds := [found for row in rows for found in row["speed_by_length"] or ()]:
        lengths = {speed["length"] for speed in speeds}
        units = {"tokens_per_second": (1, "tokens/s"), "step_bytes": (2**20, "MiB of a step")}
        panels = [
            _Panel(partial(_by_length, name=name, unit=unit), "length", y, lengths, log=True, marked=True)
            for name, (unit, y) in units.items()
            if name == "tokens_per_second" or any(speed[name] is not None for speed in speeds)
        ]
        add("speed", "speed and memory by length", ON_SPEED, panels)
    return found


def _stream_drawing(task: str, shown: Sequence[Standing], scored: dict[str, Any], metric: str) -> Drawing:
    """Return the drawing of losses over time, with the drifts and the bounds of the stream."""
    panel = _Panel(partial(_curve, column=1), "step", f"{metric} in windows", log=metric == "mse")
    figure = _figure(shown, [panel])
    (axes,) = figure.axes
    for start, _ in scored["regimes"][1:]:
        axes.axvline(start, color=style.GREY, linestyle=":", linewidth=1)
    for name, loss in scored["bounds"].items():
        style.mark_level(axes, loss, name, line="--")
    drifts = " Dotted lines are drifts." if len(scored["regimes"]) > 1 else ""
    caption = (
        f"Loss before learning: mean over seeds, and lowest to highest.{drifts} Dashed lines are bounds of "
        "the first seed's stream."
    )
    return Drawing(f"{task}-curves", f"{task}: loss over time", caption, figure)


Values = tuple[Sequence[float], Sequence[Sequence[float]]]
"""Places on the x axis, and the values of each seed at these places."""


class _Panel(NamedTuple):
    """A part of a picture; its x axis has ticks at `ticks`, and is logarithmic if they are positive."""

    values: Callable[[Standing], Values]
    x: str
    y: str
    ticks: Collection[float] = ()
    levels: bool = False
    log: bool = False
    # every value as a point without lines; points on lines
    points: bool = False
    marked: bool = False


def _apart(ticks: Collection[float], place: Callable[[float], float]) -> list[float]:
    """Return the ticks whose labels do not overlap, on an axis with `place`: `math.log` or `float`."""
    room = (place(max(ticks)) - place(min(ticks))) / 7
    kept: list[float] = []
    for tick in sorted(set(ticks)):
        if not kept or place(tick) - place(kept[-1]) >= room:
            kept.append(tick)
    return kept


def _figure(shown: Sequence[Standing], panels: Sequence[_Panel]) -> Figure:
    """Draw every mixer in every panel."""
    figure, stacked = style.stack(len(panels), height=2.9)
    rows = [row for standing in shown for row in standing.rows]
    for panel, axes in zip(panels, stacked, strict=True):
        for place, standing in enumerate(shown):
            x, seeds = panel.values(standing)
            colour, point = style.colour(place), style.point(place)
            if panel.points:
                axes.plot(x, [values[0] for values in seeds], point, color=colour, alpha=0.8)
            else:
                line, marker = style.dashes(place), point if panel.marked else ""
                columns = zip(*seeds, strict=True)
                style.draw_mean_and_range(axes, x, columns, colour=colour, style=line, marker=marker)
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
        for name, line in LEVELS.items() if panel.levels else ():
            if (value := level(rows, shown[0].task, name)) is not None:
                style.mark_level(axes, value, line=line)
    points = panels[0].points
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


def _curve(standing: Standing, column: int) -> Values:
    """Return a column of the learning curves: 1 for the loss, 2 for the accuracy."""
    return style.interpolated([(point[0], point[column]) for point in row["curve"]] for row in standing.rows)


def _by_length(standing: Standing, name: str, unit: float) -> Values:
    """Return a measurement by length, at the lengths that every seed has."""
    seeds: list[dict[int, Any]] = [
        {speed["length"]: speed[name] for speed in row["speed_by_length"] or ()} for row in standing.rows
    ]
    lengths = [length for length in seeds[0] if all(seed.get(length) is not None for seed in seeds)]
    return lengths, [[seed[length] / unit for length in lengths] for seed in seeds]


def _probes(standing: Standing, kind: str) -> Values:
    """Return the scores on a kind of probe."""
    scores = standing.probes.get(kind, {})
    return [*scores], [*zip(*scores.values(), strict=True)]


def _states(standing: Standing) -> Values:
    return [_state(standing)] * len(standing.scores), [[score] for score in standing.scores]


def _state(standing: Standing) -> int:
    # an empty state is drawn at 1, because a logarithmic axis has no 0
    return max(1, standing.state)
