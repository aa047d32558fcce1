"""`report.html` of a suite: a single page with all results, readable without network access."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from linrec.files import make_subfolder, write_text
from linrec.lab import style
from linrec.lab.bench.jobs import equally_many
from linrec.lab.bench.rows import Standing, level, standings
from linrec.lab.bench.variants import short
from linrec.lab.pages import Cell, Gallery, Picture, Table, Text, render
from linrec.lab.report.records import learns
from linrec.lab.style import FORMATS, better, mean_and_spread

PAGE = "report.html"
PICTURES = "pictures"
# line styles of the baselines
LEVELS: dict[str, style.LineStyle] = {"chance": "--", "trivial_score": ":"}
AND_LEVELS = "Chance is dashed, the trivial predictor dotted."
ON_STREAMS = (
    "Mean and standard deviation over seeds. Loss is the mean over the stream, each step predicted before "
    "it is learnt. Bound is the loss of a predictor without memory; losses that do not beat it are grey. "
    "Recovery counts the steps after a drift until the loss is within a tenth of where the regime ends, and"
    " retained is the share of what was learnt that is left when a regime returns. Early is at step 1,000. "
    "Click a heading to sort."
)
ON_TASKS = (
    "Mean and standard deviation over seeds on the test split. Lower is better for mse and perplexity. "
    "Chance is a uniform guess; trivial is the best predictor that ignores its input, and scores that do "
    "not beat it are grey. Longest is the score on the longest samples that the task is tested on. State is"
    " the number of elements in the state at the end of a sequence. Click a heading to sort."
)
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
    folder = make_subfolder(out, PICTURES)
    ended = sum(row["status"] == "done" for row in rows)
    devices = sorted({device["name"] for row in rows if "name" in (device := row.get("device") or {})})
    bad = [row for row in rows if row["status"] not in ("done", "not run")]
    missing = [f"{row['folder']}: {row['status']}: {row['message']}" for row in bad]
    if left := sum(row["status"] == "not run" for row in rows):
        missing.append(f"Jobs that have not been run: {left}; the command of the suite runs them.")
    on_streams = bool(rows) and all(learns(row["config"]) for row in rows)
    if not on_streams:
        missing += [*filter(None, (_unequal(task, table) for task in tasks))]
    page = render(
        title,
        f"{ended} of {len(rows)} jobs are done. {', '.join(devices)}",
        [
            Text("heading", "Scores"),
            Table.of(_cells(standing, rows) for standing in table),
            Text("note", ON_STREAMS if on_streams else ON_TASKS),
            *(Gallery.saved(pictures(task, table), folder) for task in tasks),
        ],
        missing=missing,
        sortable=True,
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


def _number(value: float | None, form: str = "", after: str = "", missing: str = "") -> Cell:
    # an empty value is sorted last
    if value is None:
        return Cell(missing, "number", "")
    return Cell(f"{format(value, form)}{after}", "number", value)


def _mean(values: Sequence[float | None], form: str, *, unit: float = 1, after: str = "") -> Cell:
    known = [value / unit for value in values if value is not None]
    return _number(mean_and_spread(known).mean if known else None, form, after)


def _cells(standing: Standing, of_all: Sequence[dict[str, Any]]) -> dict[str, Cell]:
    """Return the cells of a mixer on a task, or of a learner on a stream, by the heading of their column."""
    rows, form, spread = standing.rows, FORMATS[standing.metric], None
    first = (rows or standing.failed)[0]
    chance, trivial = (level(of_all, standing.task, name) for name in LEVELS)
    reached = Cell(", ".join(dict.fromkeys(row["status"] for row in standing.failed)), "number", "")
    if rows:
        score, spread = mean_and_spread(standing.scores)
        beaten = trivial is None or better(standing.metric, score, trivial)
        reached = _number(score, form)._replace(kind="number" if beaten else "number soft")
    some = "" if len(rows) == standing.seeds else f" of {standing.seeds}"
    task, name = Cell(standing.task), Cell(standing.mixer, "label")
    scored = {
        "±": _number(spread, form, missing="1 seed" if len(rows) == 1 else ""),
        "metric": Cell(standing.metric),
    }
    sized = {
        "seeds": _number(len(rows) or None, "d", after=some),
        "parameters": _number(standing.parameters, ",d"),
    }
    job = Cell(f"seed {first['seed']}", more=f"{first['command']}\n\n{json.dumps(first['config'], indent=1)}")
    if learns(first["config"]):
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
            "job": job,
        }
    longest, of_longest = max(standing.probes.get("length", {0: ()}).items())
    # the memory of the device if it has its own, else of the process
    peaks = [row["peak_bytes"] or {"device": None, "process": None} for row in rows]
    return {
        **{"task": task, "mixer": name, "score": reached, **scored},
        "chance": _number(chance, ".3g"),
        "trivial": _number(trivial, form),
        "longest": _mean(of_longest, form, after=f" at {longest:,}"),
        **sized,
        "state": _number(standing.state if rows else None, ",d"),
        "tokens/s": _mean([row["tokens_per_second"] for row in rows], ",.0f"),
        "MiB": _mean([peak["device"] or peak["process"] for peak in peaks], ",.0f", unit=2**20),
        "job": job,
    }


def pictures(task: str, table: Sequence[Standing]) -> list[Picture]:
    """Return the pictures of a task from the standings, or an empty list if no job of the task is done."""
    shown = [standing for standing in table if standing.task == task and standing.rows]
    rows = [row for standing in shown for row in standing.rows]
    if not rows:
        return []
    metric = rows[0]["metric"]
    if "stream" in rows[0]:
        return [_of_stream(task, shown, rows[0]["stream"], metric)]
    known = [(level(rows, task, name), line) for name, line in LEVELS.items()]
    levels = [style.Level(value, style=line) for value, line in known if value is not None]
    if metric == "perplexity":
        # that of the trivial predictor is many times that of a model
        levels = []
    found: list[Picture] = []

    def add(name: str, title: str, caption: str, panels: Sequence[style.Panel]) -> None:
        caption += f" {AND_LEVELS}" * any(panel.levels for panel in panels)
        # a file's name has no slash
        file = f"{task.replace('/', '-')}-{name}"
        found.append(Picture(file, f"{task}: {title}", caption, _figure(shown, panels)))

    if any(row["curve"] for row in rows):
        loss = _lines(shown, partial(_curve, column=1))
        # perplexity is a function of the loss, so the loss panel is enough
        panels = [style.Panel(loss, "step", "validation loss")]
        if metric == "accuracy":
            accuracy = _lines(shown, partial(_curve, column=2))
            panels.append(style.Panel(accuracy, "step", "validation accuracy", levels))
        elif metric == "mse":
            panels = [style.Panel(loss, "step", "validation mse", levels, log=True)]
        add("curves", "learning curves", ON_CURVES, panels)
    for name, (title, caption, kinds) in PROBES.items():
        panels = [
            style.Panel(_lines(shown, partial(_probes, kind=kind)), x, metric, levels, ticks)
            for kind, x in kinds.items()
            if len(ticks := {tick for standing in shown for tick in standing.probes.get(kind, ())}) > 1
        ]
        if panels:
            add(name, title, caption, panels)
    if len(shown) > 1:
        lines = _lines(shown, lambda of: ([_state(of)], [of.scores]), "points")
        panel = style.Panel(lines, "state size", metric, levels, {*map(_state, shown)})
        add("states", "score by state size", ON_STATES, [panel])
    if speeds := [speed for row in rows for speed in row["speed_by_length"] or ()]:
        lengths = {speed["length"] for speed in speeds}
        units = {"tokens_per_second": (1, "tokens/s"), "step_bytes": (2**20, "MiB of a step")}
        panels = []
        for name, (unit, y) in units.items():
            if name == "tokens_per_second" or any(speed[name] is not None for speed in speeds):
                lines = _lines(shown, partial(_by_length, name=name, unit=unit), "marked")
                panels.append(style.Panel(lines, "length", y, ticks=lengths, log=True))
        add("speed", "speed and memory by length", ON_SPEED, panels)
    return found


def _of_stream(task: str, shown: Sequence[Standing], scored: dict[str, Any], metric: str) -> Picture:
    """Return the picture of losses over time, with the drifts and the bounds of the stream."""
    lines = _lines(shown, partial(_curve, column=1))
    figure = _figure(shown, [style.Panel(lines, "step", f"{metric} in windows", log=metric == "mse")])
    for start, _ in scored["regimes"][1:]:
        figure.axes[0].axvline(start, color=style.GREY, linestyle=":", linewidth=1)
    for name, loss in scored["bounds"].items():
        style.mark_level(figure.axes[0], style.Level(loss, name, "--"))
    drifts = " Dotted lines are drifts." if len(scored["regimes"]) > 1 else ""
    caption = (
        f"Loss before learning: mean over seeds, and lowest to highest.{drifts} Dashed lines are bounds of "
        "the first seed's stream."
    )
    return Picture(f"{task}-curves", f"{task}: loss over time", caption, figure)


Values: TypeAlias = tuple[Sequence[float], Sequence[Sequence[float]]]
"""Places on the x axis, and the values of the seeds at each of these places."""


def _lines(
    shown: Sequence[Standing], values: Callable[[Standing], Values], kind: style.Kind = "line"
) -> list[style.Line]:
    return [style.Line(*values(standing), place, kind) for place, standing in enumerate(shown)]


def _figure(shown: Sequence[Standing], panels: Sequence[style.Panel]) -> Figure:
    """Draw panels with a legend of the mixers."""
    figure = style.draw_panels(panels, height=2.9)
    kind: style.Kind = "points" if panels[0].lines[0].kind == "points" else "line"
    handles = [
        Line2D([], [], label=short(standing.mixer), **style.look(place, kind))
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
    return lengths, [[seed[length] / unit for seed in seeds] for length in lengths]


def _probes(standing: Standing, kind: str) -> Values:
    """Return the scores on a kind of probe."""
    scores = standing.probes.get(kind, {})
    return [*scores], [*scores.values()]


def _state(standing: Standing) -> int:
    # an empty state is drawn at 1, because a logarithmic axis has no 0
    return max(1, standing.state)
