"""`report.html` of a suite: a single page with all results, readable without network access."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from linrec.files import make_subfolder, write_text
from linrec.lab.bench.pictures import drawings
from linrec.lab.bench.standings import Standing, level, standings
from linrec.lab.bench.widths import equally_many
from linrec.lab.report import markup, style
from linrec.lab.report.over_seeds import mean_and_spread
from linrec.lab.report.scores import FORMATS, better

__all__ = ["write_page"]

PAGE = "report.html"
PICTURES = "pictures"
NUMBERS = ("score", "±", "chance", "trivial", "longest", "seeds", "parameters", "state", "tokens/s", "MiB")
HEAD = ("task", "mixer", *NUMBERS[:2], "metric", *NUMBERS[2:], "job")

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
      // empty cells come last in both directions
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
body { max-width: 84rem; }
body > p, aside { max-width: 60rem; }
th button { all: unset; cursor: pointer; }
th button:focus-visible { outline: 2px solid currentColor; }
th[aria-sort=ascending] button::after { content: " ↑"; }
th[aria-sort=descending] button::after { content: " ↓"; }
#filter { font: inherit; padding: .3rem .6rem; width: 100%; max-width: 24rem; }
.label { white-space: normal; overflow-wrap: anywhere; min-width: 9rem; }
.pictures { columns: 30rem; column-gap: 2rem; }
.pictures section { break-inside: avoid; padding-top: 2.5rem; }
.pictures h2 { margin-top: 0; }
td { vertical-align: top; }
/* opens below its row, not within its column */
td details { --wide: min(60rem, 100vw - 4rem); width: 6rem; }
td details pre {
  width: var(--wide); margin-left: calc(6rem - var(--wide)); white-space: pre-wrap; overflow-wrap: anywhere;
}
@media print {
  /* nothing scrolls on paper */
  .scroll { overflow: visible; }
  .sortable { font-size: .6rem; }
  .sortable :is(th, td) { padding-right: .5rem; }
  .sortable .label { min-width: 5rem; }
  .pictures { columns: auto; }
  #filter, .sortable :is(th, td):last-child { display: none; }
}
</style>
"""


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
            markup.Picture(style.save(figure, pictures / f"{name}.png"), heading, caption)
            for name, heading, caption, figure in drawings(task, table)
        ]
        for task in tasks
    ]
    ended = sum(row["status"] == "done" for row in rows)
    where = sorted({device["name"] for row in rows if "name" in (device := row.get("device") or {})})
    bad = [row for row in rows if row["status"] not in ("done", "not run")]
    sentences = [f"{row['folder']}: {row['status']}: {row['message']}" for row in bad]
    if left := sum(row["status"] == "not run" for row in rows):
        sentences.append(f"Jobs that have not been run: {left}; the command of the suite runs them.")
    sentences += [*filter(None, (_unequal(task, table) for task in tasks))]
    page = markup.document(
        title,
        [
            STYLE,
            f"<h1>{markup.text(title)}</h1>",
            f'<p class="soft">{ended} of {len(rows)} jobs are done. {markup.text(", ".join(where))}</p>',
            markup.missing(sentences),
            "<h2>Scores</h2>",
            '<p><input id="filter" type="search" placeholder="filter" aria-label="filter rows"></p>',
            _leaderboard(table, rows),
            '<p class="soft">Mean and standard deviation over seeds on the test split. '
            "Click a heading to sort; lower is better for mse and perplexity. Chance is a uniform guess; "
            "trivial is the best predictor that ignores its input, and scores that do not beat it are grey. "
            "Longest is the score on the longest samples that the task is tested on. State is the number of "
            "elements in the state at the end of a sequence.</p>",
            *(f'<div class="pictures">{"".join(map(_section, of_task))}</div>' for of_task in drawn),
            SCRIPT,
        ],
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


def _section(picture: markup.Picture) -> str:
    return f"<section>{markup.picture(picture)}</section>"


def _leaderboard(table: Sequence[Standing], rows: Sequence[dict[str, Any]]) -> str:
    body = "\n".join(f"<tr>{_cells(standing, rows)}</tr>" for standing in table)
    titles = "".join(
        f'<th aria-sort="none"{" class=number" * (title in NUMBERS)}><button>{title}</button></th>'
        for title in HEAD
    )
    return (
        f'<div class="scroll"><table class="sortable">\n<thead><tr>{titles}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def _cells(standing: Standing, of_all: Sequence[dict[str, Any]]) -> str:
    chance, trivial = (level(of_all, standing.task, name) for name in ("chance", "trivial_score"))
    names = f'<td>{markup.text(standing.task)}</td><td class="label">{_breakable(standing.mixer)}</td>'
    scores, rows = standing.scores, standing.rows
    first = (rows or standing.failed)[0]
    form, spread = FORMATS[standing.metric], None
    if rows:
        score, spread = mean_and_spread(scores)
        weak = trivial is not None and not better(standing.metric, score, trivial)
        reached = _number(score, form, soft=weak)
    else:
        failed = markup.text(", ".join(dict.fromkeys(row["status"] for row in standing.failed)))
        reached = f'<td class="number" data-value="">{failed}</td>'
    config = markup.text(json.dumps(first["config"], indent=1))
    told = f"<pre>{markup.text(first['command'])}\n\n{config}</pre>"
    cells = [
        reached,
        _number(spread, form, missing="1 seed" if len(rows) == 1 else ""),
        f"<td>{markup.text(standing.metric)}</td>",
        _number(chance, ".3g"),
        _number(trivial, form),
        _longest(standing),
        _number(len(rows) or None, "d", after="" if len(rows) == standing.seeds else f" of {standing.seeds}"),
        _number(standing.parameters, ",d"),
        _number(standing.state if rows else None, ",d"),
        _number(_mean([row["tokens_per_second"] for row in rows]), ",.0f"),
        _number(_mean([_memory(row) for row in rows]), ",.0f"),
        f"<td><details><summary>seed {first['seed']}</summary>{told}</details></td>",
    ]
    return names + "".join(cells)


def _longest(standing: Standing) -> str:
    if not (by_length := standing.probes.get("length")):
        return _number(None)
    length, scores = max(by_length.items())
    return _number(mean_and_spread(scores).mean, FORMATS[standing.metric], after=f" at {length:,}")


def _breakable(label: str) -> str:
    return re.sub(r"([(,+:=])", r"\1<wbr>", markup.text(label))


def _number(
    value: float | None, form: str = "", *, soft: bool = False, after: str = "", missing: str = ""
) -> str:
    """Return a table cell that sorts by its value instead of its text."""
    classes = "number soft" if soft else "number"
    if value is None:
        return f'<td class="{classes}" data-value="">{missing}</td>'
    return f'<td class="{classes}" data-value="{value}">{format(value, form)}{after}</td>'


def _memory(row: dict[str, Any]) -> float | None:
    """Return a job's peak memory in MiB: device memory if the device has its own, else process memory."""
    peak = row["peak_bytes"] or {"device": None, "process": None}
    most = peak["device"] or peak["process"]
    return None if most is None else most / 2**20


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean_and_spread(known).mean if known else None
