"""`report.html` of a suite: one page that holds everything and opens without a network."""

import json
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from linrec.bench.variants import short
from linrec.report import markup, style

__all__ = ["Standing", "standings", "write_page"]

PAGE = "report.html"
PICTURES = "pictures"

# sorts a table by the column whose heading is clicked, and hides the rows that lack the words of the filter
SCRIPT = """
<script>
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  const value = (row, column) => row.cells[column].dataset.value ?? row.cells[column].textContent;
  const sort = (column, sign) => {
    const rows = [...body.rows].sort((one, other) => {
      const [a, b] = [value(one, column), value(other, column)];
      const [x, y] = [parseFloat(a), parseFloat(b)];
      // what is missing comes last, whichever way
      if (a === "" || b === "") return (a === "") - (b === "");
      return sign * (Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b) : x - y);
    });
    body.append(...rows);
    heads.forEach((head, place) =>
      head.setAttribute("aria-sort", place !== column ? "none" : sign > 0 ? "ascending" : "descending"));
  };
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () =>
    sort(column, head.getAttribute("aria-sort") === "ascending" ? -1 : 1)));
  document.getElementById("filter").addEventListener("input", event => {
    const words = event.target.value.toLowerCase().split(/\\s+/);
    for (const row of body.rows)
      row.hidden = !words.every(word => row.textContent.toLowerCase().includes(word));
  });
}
</script>
"""
STYLE = """
<style>
th button { all: unset; cursor: pointer; }
th button:focus-visible { outline: 2px solid currentColor; }
th[aria-sort=ascending] button::after { content: " ↑"; }
th[aria-sort=descending] button::after { content: " ↓"; }
#filter { font: inherit; padding: .3rem .6rem; width: 100%; max-width: 24rem; }
td details pre { max-width: 40rem; white-space: pre-wrap; overflow-wrap: anywhere; }
</style>
"""


@dataclass(frozen=True)
class Standing:
    """A mixer on a task: what its seeds have in common, and their scores.

    Args:
        task: name of the suite's entry.
        mixer: its label, with the arguments that were given.
        rows: of its jobs that are done, of the learning rate that was gone on with; one a seed.
        failed: of its other jobs, how each ended.
    """

    task: str
    mixer: str
    rows: tuple[dict[str, Any], ...]
    failed: tuple[str, ...] = ()

    @property
    def scores(self) -> list[float]:
        """Score of every seed on the test split."""
        return [row["score"] for row in self.rows]


def standings(rows: Sequence[dict[str, Any]]) -> list[Standing]:
    """Group rows by task and mixer; of several learning rates, the one of the lowest validation loss counts.

    Args:
        rows: of `make_rows`.

    Returns:
        In the order of the rows.
    """
    grouped: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        grouped.setdefault((row["task"], row["mixer"]), []).append(row)
    found = []
    for (task, mixer), of_both in grouped.items():
        done = [row for row in of_both if row["status"] == "done"]
        # the rates were tried with one seed
        tried = [row for row in done if row["seed"] == done[0]["seed"]]
        rate = min(tried, key=lambda row: row["validation"]["loss"])["lr"] if tried else None
        failed = tuple(row["status"] for row in of_both if row["status"] != "done")
        found.append(Standing(task, mixer, tuple(row for row in done if row["lr"] == rate), failed))
    return found


def write_page(rows: Sequence[dict[str, Any]], out: Path, *, title: str) -> Path:
    """Write `report.html` and its pictures; return the page.

    Args:
        rows: of `make_rows`.
        out: folder of the suite.
        title: heading of the page.

    Raises:
        OSError: the disk is full, say.
    """
    table = standings(rows)
    pictures = out / PICTURES
    pictures.mkdir(exist_ok=True)
    drawn = [_drawn(pictures, *picture) for task in _tasks(table) for picture in _pictures(task, table)]
    ended = sum(row["status"] == "done" for row in rows)
    where = sorted({row["device"]["name"] for row in rows if "device" in row})
    bad = [row for row in rows if row["status"] not in ("done", "not run")]
    sentences = [f"{row['folder']}: {row['status']}: {row['message']}" for row in bad]
    if left := sum(row["status"] == "not run" for row in rows):
        sentences.append(f"{left} jobs have not been run; the command of the suite goes on with them.")
    page = markup.document(
        title,
        [
            STYLE,
            f"<h1>{escape(title)}</h1>",
            f'<p class="soft">{ended} of {len(rows)} jobs are done. {escape(", ".join(where))}</p>',
            markup.missing(sentences),
            "<h2>Scores</h2>",
            '<p><input id="filter" type="search" placeholder="filter" aria-label="filter rows"></p>',
            _leaderboard(table),
            '<p class="soft">Mean over seeds and standard deviation on the test split. '
            "A heading sorts; mse and perplexity are better where they are lower.</p>",
            *map(markup.picture, drawn),
            SCRIPT,
        ],
    )
    markup.write(out / PAGE, page)
    return out / PAGE


def _tasks(table: Sequence[Standing]) -> list[str]:
    return list(dict.fromkeys(standing.task for standing in table))


def _leaderboard(table: Sequence[Standing]) -> str:
    head = (
        "task",
        "mixer",
        "metric",
        "score",
        "±",
        "chance",
        "seeds",
        "parameters",
        "state",
        "tokens/s",
        "MiB",
    )
    titles = "".join(f'<th aria-sort="none"><button>{title}</button></th>' for title in (*head, "job"))
    body = "\n".join(f"<tr>{_cells(standing)}</tr>" for standing in table)
    return (
        f'<div class="scroll"><table class="sortable">\n<thead><tr>{titles}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def _cells(standing: Standing) -> str:
    scores, rows = standing.scores, standing.rows
    if not rows:
        failed = ", ".join(standing.failed)
        names = "".join(f"<td>{escape(name)}</td>" for name in (standing.task, standing.mixer, failed))
        return names + '<td class="number" data-value=""></td>' * 8 + "<td></td>"
    first = rows[0]
    memory = [_memory(row) for row in rows]
    spread = statistics.stdev(scores) if len(scores) > 1 else None
    numbers = (
        (statistics.mean(scores), ".4g"),
        (spread, ".2g"),
        (first["chance"] if first["metric"] != "perplexity" else None, ".3g"),
        (len(rows), "d"),
        (first["parameters"], ",d"),
        (first["state_size"], ",d"),
        (_mean([row["tokens_per_second"] for row in rows]), ",.0f"),
        (_mean(memory), ",.0f"),
    )
    text = "".join(f"<td>{escape(name)}</td>" for name in (standing.task, standing.mixer, first["metric"]))
    cells = "".join(
        f'<td class="number" data-value="{"" if value is None else value}">'
        f"{'' if value is None else format(value, form)}</td>"
        for value, form in numbers
    )
    config = escape(json.dumps(first["config"], indent=1))
    told = f"<pre>{escape(first['command'])}\n\n{config}</pre>"
    return f"{text}{cells}<td><details><summary>seed {first['seed']}</summary>{told}</details></td>"


def _memory(row: dict[str, Any]) -> float | None:
    """MiB that a job took at its peak, of the device where it has memory of its own."""
    peak = row["peak_bytes"]
    if peak is None:
        return None
    return (peak["device"] or peak["process"]) / 2**20


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known else None


Draw = Callable[[Axes, Standing, str], None]


def _pictures(task: str, table: Sequence[Standing]) -> list[tuple[str, str, str, Figure]]:
    """File name, title, caption and picture of what a task has to show."""
    of_task = [standing for standing in table if standing.task == task and standing.rows]
    found = []
    metric = of_task[0].rows[0]["metric"] if of_task else ""
    if any(row["curve"] for standing in of_task for row in standing.rows):
        caption = "Loss on the validation split while training: mean over seeds, and lowest to highest."
        figure = _figure(of_task, _draw_curve, x="step", y="validation loss")
        found.append((f"{task}-curves", f"{task}: learning curves", caption, figure))
    if any(len(row["probes"]) > 1 for standing in of_task for row in standing.rows):
        caption = "Score on samples of other lengths than those of training; chance is dashed."
        lengths = {int(name) for s in of_task for row in s.rows for name in row["probes"] if name.isdigit()}
        figure = _figure(of_task, _draw_probes, x="length", y=metric, ticks=lengths)
        found.append((f"{task}-lengths", f"{task}: score by length", caption, figure))
    if len(of_task) > 1:
        caption = (
            "Score of every seed against the elements of a sequence's state, of attention those that a step "
            "adds; chance is dashed."
        )
        figure = _figure(of_task, _draw_state, x="state size", y=metric, ticks={*map(_state, of_task)})
        found.append((f"{task}-states", f"{task}: score by state size", caption, figure))
    return found


def _figure(
    of_task: Sequence[Standing], draw: Draw, *, x: str, y: str, ticks: Collection[int] = ()
) -> Figure:
    """Draw every mixer; with `ticks`, on a logarithmic axis, scores beside what chance reaches."""
    figure = style.make_figure(height=3.2)
    axes = figure.subplots()
    for place, standing in enumerate(of_task):
        draw(axes, standing, style.colour(place))
    style.finish_axes(axes, x=x, y=y)
    if ticks:
        axes.set_xscale("log")
        axes.minorticks_off()
        # few enough that their labels have room
        shown = sorted(ticks)[:: -(-len(ticks) // 6)]
        axes.set_xticks(shown, [f"{tick:,}" for tick in shown])
        first = of_task[0].rows[0]
        if first["metric"] != "perplexity":
            axes.axhline(first["chance"], color=style.GREY, linestyle="--", linewidth=1)
    handles = [
        Line2D([], [], color=style.colour(place), label=short(standing.mixer))
        for place, standing in enumerate(of_task)
    ]
    style.add_legend(figure, handles)
    return figure


def _draw_curve(axes: Axes, standing: Standing, colour: str) -> None:
    curves = [row["curve"] for row in standing.rows if row["curve"]]
    # a run that ended early has fewer points than the others
    steps = [step for step, *_ in min(curves, key=len, default=[])]
    losses = [[loss for _, loss, _ in curve[: len(steps)]] for curve in curves]
    style.draw_mean_and_range(axes, steps, losses, colour=colour)


def _draw_probes(axes: Axes, standing: Standing, colour: str) -> None:
    key = "accuracy" if standing.rows[0]["metric"] == "accuracy" else "loss"
    lengths = sorted(standing.rows[0]["probes"], key=_number)
    if lengths and all(length.isdigit() for length in lengths):
        scores = [[row["probes"][length][key] for length in lengths] for row in standing.rows]
        style.draw_mean_and_range(axes, [int(length) for length in lengths], scores, colour=colour)


def _number(name: str) -> int:
    return int(name) if name.isdigit() else 0


def _draw_state(axes: Axes, standing: Standing, colour: str) -> None:
    axes.plot([_state(standing)] * len(standing.scores), standing.scores, "o", color=colour, alpha=0.8)


def _state(standing: Standing) -> int:
    # a state of none has a place on a logarithmic axis too
    return max(1, standing.rows[0]["state_size"])


def _drawn(folder: Path, name: str, title: str, caption: str, figure: Figure) -> markup.Picture:
    return markup.Picture(style.save(figure, folder / f"{name}.png"), title, caption)
