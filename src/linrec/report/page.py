"""The page: one HTML file that holds everything, for a screen of any width, light or dark."""

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import linrec
from linrec.report.arms import Arm, mean_and_spread
from linrec.train import Run

STYLE = """
:root {
  color-scheme: light dark;
  --text: #1b1b1b; --soft: #5c5c5c; --line: #d9d9d9; --page: #fff; --box: #f5f5f5;
}
@media (prefers-color-scheme: dark) {
  :root { --text: #e8e8e8; --soft: #a9a9a9; --line: #3d3d3d; --page: #161616; --box: #212121; }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 60rem;
  background: var(--page); color: var(--text); font: 1rem/1.5 system-ui, sans-serif;
}
h1 { font-size: 1.6rem; margin: 0 0 .25rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; }
p { margin: .5rem 0; }
.soft, figcaption { color: var(--soft); font-size: .9rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td {
  padding: .4rem .9rem .4rem 0; border-bottom: 1px solid var(--line);
  text-align: left; white-space: nowrap;
}
thead th { color: var(--soft); font-weight: 500; }
.number { text-align: right; }
figure { margin: .75rem 0 0; max-width: 42rem; }
figure img {
  display: block; width: 100%; height: auto; padding: .5rem; border-radius: .5rem; background: #fff;
}
figcaption { margin-top: .5rem; }
pre {
  padding: .75rem; border-radius: .5rem; background: var(--box); overflow-x: auto;
  font: .85rem/1.5 ui-monospace, monospace;
}
aside { padding: .5rem 1rem; border-left: 3px solid #e69f00; background: var(--box); }
aside ul { margin: .25rem 0; padding-left: 1.25rem; overflow-wrap: anywhere; }
"""


@dataclass(frozen=True)
class Picture:
    """A picture of the page.

    Attributes:
        path: the PNG file.
        title: its heading.
        caption: what is to be seen.
    """

    path: Path
    title: str
    caption: str


def render_page(arms: Sequence[Arm], pictures: Iterable[Picture], missing: Sequence[str]) -> str:
    """Return the page as HTML.

    Args:
        arms: the arms of the results' table.
        pictures: pictures in order; they are stored inside the page.
        missing: what could not be shown, a sentence each.
    """
    title = " and ".join(dict.fromkeys(run.config.name for arm in arms for run in arm.runs))
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">{_count(arms)} · written by linrec {escape(linrec.__version__)}</p>',
        _missing(missing),
        "<h2>Results</h2>",
        _results(arms),
        *map(_picture, pictures),
        _settings(arms),
        "<h2>Runs</h2>",
        _runs(arms),
        "<h2>Commands</h2>",
        _commands(arms),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)} – linrec report</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body>\n</html>\n"
    )


def _count(arms: Sequence[Arm]) -> str:
    n_runs = sum(len(arm.runs) for arm in arms)
    return f"{n_runs} run{'s' * (n_runs > 1)} in {len(arms)} arm{'s' * (len(arms) > 1)}"


def _results(arms: Sequence[Arm]) -> str:
    head = ["arm", "test accuracy", "validation accuracy", "seeds", "parameters", "steps/s", "time per run"]
    rows = []
    for arm in arms:
        results = arm.results
        rows.append(
            [
                arm.label,
                mean_and_spread([result["test"]["accuracy"] for result in results]),
                mean_and_spread([result["validation"]["accuracy"] for result in results]),
                ", ".join(map(str, arm.seeds)) or "–",
                f"{results[0]['parameters']:,}" if results else "–",
                mean_and_spread([result["steps_per_second"] for result in results], digits=1),
                _duration(results),
            ]
        )
    tasks = list(dict.fromkeys(run.config.task for arm in arms for run in arm.runs))
    trivial = [("always the most frequent answer", f"{task.trivial_score:.3f}") for task in tasks]
    chance = [("chance", f"{task.chance:.3f}") for task in tasks]
    rows += [[*row, *[""] * (len(head) - 2)] for row in dict.fromkeys(trivial + chance)]
    note = '<p class="soft">Mean ± standard deviation over the seeds where there are several.</p>'
    return _table(head, rows, numbers=range(1, len(head))) + note


def _runs(arms: Sequence[Arm]) -> str:
    head = ["folder", "seed", "test", "validation", "steps", "minutes", "arm", "device", "commit"]
    rows = []
    for arm in arms:
        for run in arm.runs:
            result, validation = run.result, _validation_accuracy(run)
            commit = (run.about.get("commit") or "–")[:10] + (" + changes" if run.about.get("dirty") else "")
            rows.append(
                [
                    run.path.name or str(run.path),
                    str(run.config.loop.seed),
                    f"{result['test']['accuracy']:.4f}" if result else "–",
                    f"{validation:.4f}" if validation is not None else "–",
                    f"{result['steps'] if result else _latest_step(run):,}",
                    f"{result['seconds'] / 60:.1f}" if result else "–",
                    arm.label,
                    run.about.get("device", {}).get("name", "–"),
                    commit,
                ]
            )
    return _table(head, rows, numbers=range(1, 6))


def _settings(arms: Sequence[Arm]) -> str:
    if len(arms) < 2:
        return ""
    rows = [[name, *(str(arm.settings[name]) for arm in arms)] for name in arms[0].settings]
    head = ["setting", *(arm.label for arm in arms)]
    return "<h2>What differs</h2>" + _table(head, rows, numbers=range(0))


def _commands(arms: Sequence[Arm]) -> str:
    commands = [run.about.get("command") for arm in arms for run in arm.runs]
    known = list(dict.fromkeys(command for command in commands if command))
    if not known:
        return "<p>The runs were started from Python; config.json in their folders says all.</p>"
    return f"<pre>{escape(chr(10).join(known))}</pre>"


def _missing(sentences: Sequence[str]) -> str:
    if not sentences:
        return ""
    return (
        "<aside><p>What is missing:</p><ul>"
        + "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
        + "</ul></aside>"
    )


def _picture(picture: Picture) -> str:
    data = base64.b64encode(picture.path.read_bytes()).decode("ascii")
    return (
        f"<h2>{escape(picture.title)}</h2>\n"
        f'<figure><img alt="{escape(picture.title)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{escape(picture.caption)}</figcaption></figure>"
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: range) -> str:
    def cells(tag: str, values: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=number' * (column in numbers)}>{escape(value)}</{tag}>"
            for column, value in enumerate(values)
        )

    body = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table>\n<thead><tr>{cells("th", head)}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def _validation_accuracy(run: Run) -> float | None:
    if run.result is not None:
        accuracy: float = run.result["validation"]["accuracy"]
        return accuracy
    return next((r["accuracy"] for r in reversed(run.metrics) if r["split"] == "validation"), None)


def _latest_step(run: Run) -> int:
    return max((record["step"] for record in run.metrics), default=0)


def _duration(results: Sequence[dict[str, Any]]) -> str:
    if not results:
        return "–"
    seconds = sum(result["seconds"] for result in results) / len(results)
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s"
