"""The page of a report: results, pictures, runs and commands."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import linrec
from linrec.report import markup
from linrec.report.arms import Arm, mean_and_spread
from linrec.train import Run


def render_page(arms: Sequence[Arm], pictures: Iterable[markup.Picture], missing: Sequence[str]) -> str:
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
        markup.missing(missing),
        "<h2>Results</h2>",
        _results(arms),
        *map(markup.picture, pictures),
        _settings(arms),
        "<h2>Runs</h2>",
        _runs(arms),
        "<h2>Commands</h2>",
        _commands(arms),
    ]
    return markup.document(f"{title} – linrec report", parts)


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
    return markup.table(head, rows, numbers=range(1, len(head))) + note


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
    return markup.table(head, rows, numbers=range(1, 6))


def _settings(arms: Sequence[Arm]) -> str:
    if len(arms) < 2:
        return ""
    rows = [[name, *(str(arm.settings[name]) for arm in arms)] for name in arms[0].settings]
    head = ["setting", *(arm.label for arm in arms)]
    return "<h2>What differs</h2>" + markup.table(head, rows, numbers=range(0))


def _commands(arms: Sequence[Arm]) -> str:
    commands = [run.about.get("command") for arm in arms for run in arm.runs]
    known = list(dict.fromkeys(command for command in commands if command))
    if not known:
        return "<p>The runs were started from Python; config.json in their folders says all.</p>"
    return f"<pre>{escape(chr(10).join(known))}</pre>"


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
