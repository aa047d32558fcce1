"""Tables of the page on learning online, from the committed results."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

from linrec.lab.bench import STREAMS
from linrec.lab.bench.rows import make_row, standings
from linrec.lab.report.records import read_table
from linrec.lab.style import FORMATS, format_mean_and_spread

ROOT = Path(__file__).parents[1]
Table: TypeAlias = tuple[Sequence[str], Sequence[Sequence[str]]]
"""A header and rows."""


LONG = 1_000_000
"""Steps, of all rows, of the runs that show that memory and time do not grow."""


def committed(stream: str, *, long: bool = False) -> list[dict[str, Any]]:
    """Return the committed runs on a stream that are long, or that are not."""
    lines = (ROOT / f"results/streams/{stream}.jsonl").read_text().splitlines()
    runs = map(json.loads, lines)
    return [run for run in runs if (run["result"]["steps"] * run["config"]["rows"] >= LONG) == long]


def online_runs() -> Table:
    """The last window's loss of every learner on delay-copy, mean and spread over the seeds."""
    losses: dict[str, list[float]] = {}
    for run in committed("delay-copy"):
        losses.setdefault(run["config"]["learner"], []).append(run["result"]["curve"][-1])
    rows = [(f"`{name}`", format_mean_and_spread(of), str(len(of))) for name, of in losses.items()]
    return ("learner", "cross-entropy in nats", "seeds"), rows


def add_memory_runs() -> Table:
    """The losses of three windows of the runs on add-memory, mean and spread over the seeds."""
    windows = {"steps 10,001 to 15,000": 2, "15,001 to 20,000": 3, "55,001 to 60,000": 11}
    curves: dict[str, list[list[float]]] = {}
    for run in committed("add-memory"):
        of = run["config"]
        name = f"`{of['learner']}`"
        if of["learner"] == "tbptt":
            name += f", chunks of {of['chunk']}"
        if of["clip_norm"] is not None:
            name += f", clipped at {of['clip_norm']:g}"
        curves.setdefault(name, []).append(run["result"]["curve"])
    rows = []
    for name, found in curves.items():
        cells = (
            format_mean_and_spread([curve[place] for curve in found]) if place < len(found[0]) else "–"
            for place in windows.values()
        )
        rows.append((name, *cells, str(len(found))))
    return ("learner", *windows, "seeds"), rows


def stream_suite() -> Table:
    """The suite `streams`: scores and costs of every learner, means over the seeds."""
    header = (
        *("stream", "learner", "loss", "at the end", "recovery", "retained", "KiB carried", "KiB in a chunk"),
        *("µs at 1,000", "µs at the end"),
    )
    found = standings([make_row(job) for job in read_table(ROOT / "results/streams")])
    # in the order of the suite
    order = [entry.name for entry in STREAMS]
    rows = []
    for each in sorted(found, key=lambda each: order.index(each.task)):
        scored = [row["stream"] for row in each.rows]
        form = FORMATS["mse" if each.metric == "mse" else "loss"].replace("6f", "4f")
        recovery, retained = (
            [of[name] for of in scored if of[name] is not None] for name in ("recovery", "retained")
        )
        chunk = [row["speed_by_length"][0]["step_bytes"] / 1024 for row in each.rows]
        # the fastest of the seeds, because other processes slow single windows down
        speeds = [min(of["at"][place]["microseconds_per_step"] for of in scored) for place in (0, -1)]
        rows.append((
            each.task,
            f"`{each.mixer}`",
            format_mean_and_spread(each.scores, form),
            format_mean_and_spread([of["fading"] for of in scored], form),
            f"{fmean(recovery):,.0f}" if recovery else "",
            f"{fmean(retained):.2f}" if retained else "",
            f"{scored[0]['memory_bytes'] / 1024:,.1f}",
            f"{fmean(chunk):,.0f}",
            *(f"{speed:,.0f}" for speed in speeds),
        ))  # fmt: skip
    return header, rows


def stream_bounds() -> Table:
    """The losses of simple predictors on the streams of the suite, means over the seeds."""
    bounds: dict[str, dict[str, list[float]]] = {entry.name: {} for entry in STREAMS}
    for row in map(make_row, read_table(ROOT / "results/streams")):
        for name, loss in row["stream"]["bounds"].items() if row["mixer"] == "rtrl" else ():
            bounds[row["task"]].setdefault(name, []).append(loss)
    rows = [
        (stream, ", ".join(f"{name} {fmean(losses):.4g}" for name, losses in of.items()))
        for stream, of in bounds.items()
    ]
    return ("stream", "losses of simple predictors"), rows


def long_runs() -> Table:
    """Memory and time of the runs of a million steps and more."""
    rows = []
    for run in committed("delay-copy", long=True):
        result, (early, late) = run["result"], run["result"]["at"]
        costs = [f"{of['memory_bytes']:,}" for of in (early, late)]
        costs += [f"{of['microseconds_per_step']:,.0f}" for of in (early, late)]
        name, on = f"`{run['config']['learner']}`", run["device"]["name"].removeprefix("Intel(R) ")
        steps = f"{run['config']['rows']} x {result['steps']:,}"
        rows.append((name, on, steps, *costs, f"{result['fading']:.3f}"))
    header = (
        *(
            "learner",
            "on",
            "rows x steps",
            "bytes at 1,000",
            "bytes at the end",
            "µs at 1,000",
            "µs at the end",
        ),
        "fading loss",
    )
    return header, rows


def learner_speed() -> Table:
    """Times of chunks by RTRL and by truncated backpropagation, and the bytes of the traces."""
    rows = []
    paths = sorted((ROOT / "results/learners").glob("*.json"))
    for path in (path for path in paths if not path.stem.endswith("-bias")):
        found = json.loads(path.read_text())
        for row in found["rows"]:
            ms, kib = row["least_ms"], {name: of / 1024 for name, of in row["memory_bytes"].items()}
            name = found["device"]["name"].removeprefix("Intel(R) ")
            cells = [f"{of:.2f}" for of in (ms["tbptt"], ms["rtrl"], row["ratio"])]
            captured = ms.get("tbptt captured"), ms.get("rtrl captured"), row.get("captured_ratio")
            cells += ["" if of is None else f"{of:.2f}" for of in captured]
            sizes = f"{row['batch']} x {row['time']}"
            rows.append((name, f"`{row['mixer']}`", sizes, *cells, f"{kib['rtrl']:,.1f}"))
    header = (
        "on",
        "mixer",
        "rows x steps",
        "`tbptt`, ms",
        "`rtrl`, ms",
        "times",
        "`tbptt` captured, ms",
        "`rtrl` captured, ms",
        "times",
        "KiB of `rtrl`",
    )
    return header, rows


def learner_bias() -> Table:
    """Cosines of the layers' gradients with those of backpropagation through the whole stream."""
    (path,) = (ROOT / "results/learners").glob("*-bias.json")
    rows = [
        (
            f"{row['layers']} x `{row['mixer']}`",
            str(row["time"]),
            *(
                ", ".join(f"{of:.3f}" for of in row["cosines"][name])
                for name in ("chunk", "spatial", "tbptt")
            ),
        )
        for row in json.loads(path.read_text())["rows"]
    ]
    return ("stack", "chunk", '`credit="chunk"`', '`credit="spatial"`', "`tbptt`"), rows


def last_windows(stream: str, name: Callable[[dict[str, Any]], str], places: Sequence[int]) -> Table:
    """The losses of windows of the learners' runs on a stream, mean and spread over the seeds.

    Args:
        stream: name of the stream.
        name: returns the name of a run's row from its configuration.
        places: numbers of the windows, -1 for the last.
    """
    runs = [run for run in committed("learners") if run["config"]["stream"] == stream]
    found: dict[str, list[list[float]]] = {}
    for run in runs:
        found.setdefault(name(run["config"]), []).append(run["result"]["curve"])
    rows = [
        (
            of,
            *(format_mean_and_spread([curve[place] for curve in curves]) for place in places),
            str(len(curves)),
        )
        for of, curves in found.items()
    ]
    width, last = runs[0]["result"]["width"], len(runs[0]["result"]["curve"])
    ends = [width * (place % last + 1) for place in places]
    return ("learner", *(f"steps {end - width + 1:,} to {end:,}" for end in ends), "seeds"), rows


def influence_runs() -> Table:
    """The losses of approximate influence on add-memory."""
    return last_windows("add-memory", lambda of: f"`{of['learner']}`", (0, 1, -1))


def columnar_runs() -> Table:
    """The losses of networks of columns on trace patterning."""

    def named(of: dict[str, Any]) -> str:
        per_stage = of["model_args"].get("per_stage")
        kind = {None: "columnar", 1: "constructive"}.get(per_stage, "columnar-constructive")
        return f"{kind}, {of['model_args']['columns']} columns"

    return last_windows("trace-patterning", named, (1, 3, -1))


def ptncn_runs() -> Table:
    """The losses of P-TNCN on characters."""
    return last_windows("text", lambda of: f"`{of['learner']}`", (5, -1))


def reservoir_runs() -> Table:
    """The root mean squared errors of a reservoir on Mackey-Glass."""
    header, rows = ("learner", "steps 1,001 to 2,000", "steps 5,001 to 6,000", "seeds"), []
    runs = [run for run in committed("learners") if run["config"]["stream"] == "mackey-glass"]
    errors = [[run["result"]["curve"][place] ** 0.5 for run in runs] for place in (1, -1)]
    rows.append(("`frozen_rls`", *(f"{min(of):.5f} to {max(of):.5f}" for of in errors), str(len(runs))))
    return header, rows


TABLES: dict[str, Callable[[], Table]] = {
    table.__name__: table
    for table in (
        *(online_runs, add_memory_runs, influence_runs, columnar_runs, ptncn_runs, reservoir_runs),
        *(stream_suite, stream_bounds, long_runs, learner_speed, learner_bias),
    )
}
