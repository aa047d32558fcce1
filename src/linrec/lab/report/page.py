"""The page of a report: results, pictures, runs and commands."""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import linrec
from linrec.errors import DataError, printable
from linrec.lab.report import markup
from linrec.lab.report.arms import Arm
from linrec.lab.report.baseline import Comparison
from linrec.lab.report.over_seeds import format_mean_and_spread, mean_and_spread
from linrec.lab.report.perplexity import UNITS
from linrec.lab.report.scores import FORMATS
from linrec.lab.tasks import Task, judged_by
from linrec.lab.train import Run

SPLITS = ("test", "validation")
MSE = "mean squared error"


class Sample(NamedTuple):
    """A text that a language model wrote.

    Args:
        arm: label of its arm.
        seed: of training.
        content: text and settings, from `sample_text`.
    """

    arm: str
    seed: int
    content: Mapping[str, Any]


def render_page(
    arms: Sequence[Arm],
    pictures: Iterable[markup.Picture],
    missing: Sequence[str],
    comparisons: Sequence[Comparison] = (),
    samples: Sequence[Sample] = (),
) -> str:
    """Return the page as HTML.

    Args:
        arms: the arms of the results' table.
        pictures: pictures in order; they are stored inside the page.
        missing: a sentence for each missing part.
        comparisons: arms beside a baseline.
        samples: texts of language models.
    """
    title = " and ".join(dict.fromkeys(run.config.name for arm in arms for run in arm.runs))
    parts = [
        f"<h1>{markup.text(title)}</h1>",
        f'<p class="soft">{_count(arms)} · written by linrec {markup.text(linrec.__version__)}</p>',
        markup.missing(missing),
        "<h2>Results</h2>",
        _results(arms),
        _comparisons(comparisons),
        _perplexities(arms),
        *map(markup.picture, pictures),
        _samples(samples),
        _settings(arms),
        "<h2>Runs</h2>",
        _runs(arms),
        "<h2>Commands</h2>",
        _commands(arms),
    ]
    return markup.document(f"{title} – linrec report", parts)


def _count(arms: Sequence[Arm]) -> str:
    n_runs = sum(len(arm.runs) for arm in arms)
    return f"{n_runs} run{'s' * (n_runs > 1)} of {len(arms)} configuration{'s' * (len(arms) > 1)}"


def _results(arms: Sequence[Arm]) -> str:
    rows = [
        {
            "configuration": arm.label,
            **_means(arm),
            "runs": _seeds(arm),
            "parameters": f"{arm.results[0]['parameters']:,}" if arm.results else "–",
            "steps/s": format_mean_and_spread([result["steps_per_second"] for result in arm.results], ",.1f"),
            "time per run": _duration(arm.results),
        }
        for arm in arms
    ]
    tasks = list(dict.fromkeys(run.config.task for arm in arms for run in arm.runs))
    rows += [row for task in tasks for row in _without_model(task)]
    head = list(dict.fromkeys(name for row in rows[: len(arms)] for name in row))
    # tasks that differ in nothing that is shown here
    cells = dict.fromkeys(tuple(row.get(name, "") for name in head) for row in rows[len(arms) :])
    table = [[row.get(name, "") for name in head] for row in rows[: len(arms)]] + [*map(list, cells)]
    note = (
        '<p class="soft">Runs of a configuration differ only in their seed. '
        "Scores are mean ± standard deviation over the seeds.</p>"
    )
    return markup.table(head, table, numbers=range(1, len(head))) + note


def _seeds(arm: Arm) -> str:
    """Return the seeds of the runs that have finished."""
    if not arm.seeds:
        return "–"
    return f"seed{'s' * (len(arm.seeds) > 1)} {', '.join(map(str, arm.seeds))}"


def _without_model(task: Task) -> list[dict[str, str]]:
    """Return the rows of chance and of the best constant answer."""
    match by := judged_by(task):
        case "accuracy":
            trivial = {"configuration": "always the most frequent answer", "test accuracy": _trivial(task)}
            return [trivial, {"configuration": "chance", "test accuracy": format(task.chance, FORMATS[by])}]
        case "mse":
            return [{"configuration": "always the mean", f"test {MSE}": _trivial(task)}]
    # the most frequent token is known only from the text, which a report does not need
    return [{"configuration": "chance", "validation perplexity": f"{1 / task.chance:,.0f}"}]


def _trivial(task: Task) -> str:
    """Return the score of the best constant answer; a dash where the task's files are missing."""
    try:
        return format(task.trivial_score, FORMATS[judged_by(task)])
    except DataError:
        return "–"


def _means(arm: Arm) -> dict[str, str]:
    """Return the scores of an arm: accuracies, squared errors, or perplexities and a loss per token."""
    by = judged_by(arm.runs[0].config.task)
    if by == "accuracy":
        return {f"{split} accuracy": _over_seeds(arm, split, "accuracy", FORMATS[by]) for split in SPLITS}
    if by == "mse":
        return {f"{split} {MSE}": _over_seeds(arm, split, "loss", FORMATS[by]) for split in SPLITS}
    losses = {split: [result[split]["loss"] for result in arm.results if result[split]] for split in SPLITS}
    perplexities = {split: [math.exp(min(loss, 700)) for loss in losses[split]] for split in SPLITS}
    told = {
        f"{split} perplexity": format_mean_and_spread(perplexities[split], FORMATS[by]) for split in SPLITS
    }
    return told | {"validation loss": format_mean_and_spread(losses["validation"], FORMATS["loss"])}


def _over_seeds(arm: Arm, split: str, name: str, mean_format: str) -> str:
    """Return mean and spread of a score of every run that has finished."""
    return format_mean_and_spread([result[split][name] for result in arm.results], mean_format)


def _comparisons(comparisons: Sequence[Comparison]) -> str:
    """Return a table of configurations beside their baselines, regressions first."""
    if not comparisons:
        return ""
    head = ["configuration", "score", "baseline", "spread", "metric", "verdict"]
    rows = [
        [
            comparison.label,
            format_mean_and_spread(comparison.scores, FORMATS[comparison.metric]),
            format_mean_and_spread(comparison.baseline, FORMATS[comparison.metric]),
            f"{comparison.spread:.2g}",
            comparison.metric,
            comparison.verdict,
        ]
        for comparison in sorted(comparisons, key=lambda comparison: comparison.verdict != "regression")
    ]
    note = (
        '<p class="soft">Better or a regression where the means differ by more than the spread: the standard '
        "deviation of the baseline's seeds, and at least a hundredth of its mean.</p>"
    )
    return "<h2>Against the baseline</h2>" + markup.table(head, rows, numbers=range(1, 4)) + note


def _perplexities(arms: Sequence[Arm]) -> str:
    """Return a table of the perplexities that `linrec eval` found; most lengths are left out."""
    head = ["folder", "configuration", "text", "window", "per token", "per word", "per byte", "bits/byte"]
    rows = []
    for arm in arms:
        for run in arm.runs:
            found = run.extra.get("perplexity")
            if found is None:
                continue
            split = f", {found['split']}" if found.get("split") else ""
            windows = [score["length"] for score in found["scores"] if score["length"] is not None]
            shown = {found["trained_length"], max(windows, default=None), None}
            rows += [
                [
                    run.path.name or str(run.path),
                    arm.label,
                    f"{Path(found['data']).name}{split}",
                    "carried" if score["length"] is None else f"{score['length']:,}",
                    *("–" if score[name] is None else f"{score[name]:,.3f}" for name in UNITS),
                ]
                for score in found["scores"]
                if score["length"] in shown
            ]
    if not rows:
        return ""
    note = (
        '<p class="soft">Windows of the length of training, the longest ones, and the state carried through '
        "the whole text, as far as they were evaluated. perplexity.json in the run folder has all.</p>"
    )
    return "<h2>Perplexity</h2>" + markup.table(head, rows, numbers=range(3, len(head))) + note


def _samples(samples: Sequence[Sample]) -> str:
    """Return the sample texts, each below a line that says how it was made."""
    if not samples:
        return ""
    parts = ["<h2>Sample text</h2>"]
    for arm, seed, content in samples:
        made = f"{arm}, seed {seed}. The text continues {content['prompt']}; it was drawn at temperature "
        made += f"{content['temperature']:g} with random seed {content['seed']}."
        text = escape(printable(content["text"]))
        # a parser drops the first newline of a <pre>
        parts.append(f'<p class="soft">{markup.text(made)}</p>\n<pre class="sample">\n{text}</pre>')
    return "\n".join(parts)


def _runs(arms: Sequence[Arm]) -> str:
    head = ["folder", "seed", "test", "validation", "steps", "minutes", "configuration", "device", "commit"]
    rows = []
    for arm in arms:
        for run in arm.runs:
            result = run.result
            commit = (run.about.get("commit") or "–")[:10] + (" + changes" if run.about.get("dirty") else "")
            rows.append(
                [
                    run.path.name or str(run.path),
                    str(run.config.loop.seed),
                    _score(run, result["test"] if result else {}),
                    _score(run, result["validation"] if result else _latest_validation(run)),
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
    return f"<pre>{markup.text(chr(10).join(known))}</pre>"


def _score(run: Run, scores: Mapping[str, Any]) -> str:
    """Return the accuracy of a split, its loss for other metrics, or a dash without either."""
    by = judged_by(run.config.task)
    name = "accuracy" if by == "accuracy" else "loss"
    if name not in scores:
        return "–"
    if by == "mse":
        return f"{scores[name]:.4g}"
    return f"{scores[name]:.4f}" + (" nats" if name == "loss" else "")


def _latest_validation(run: Run) -> Mapping[str, Any]:
    return next((record for record in reversed(run.metrics) if record["split"] == "validation"), {})


def _latest_step(run: Run) -> int:
    return max((record["step"] for record in run.metrics), default=0)


def _duration(results: Sequence[dict[str, Any]]) -> str:
    if not results:
        return "–"
    seconds = mean_and_spread([result["seconds"] for result in results]).mean
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s"
