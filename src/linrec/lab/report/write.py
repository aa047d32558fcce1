"""The report: from run folders or tables to a page and its pictures."""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from linrec import __version__
from linrec.errors import DataError
from linrec.files import write_text
from linrec.lab.inspection.collect import inspect_model
from linrec.lab.pages import Block, Gallery, Picture, Table, Text, render
from linrec.lab.report.arms import Arm, Comparison, compare_arms, group_runs
from linrec.lab.report.collect import is_language_model, sample_text
from linrec.lab.report.pictures import (
    average,
    by_layer,
    draw_accuracy_by_span,
    draw_learning_curves,
    draw_score_by_number,
    draw_transitions,
)
from linrec.lab.report.records import read_runs
from linrec.lab.style import FORMATS, TITLES, format_mean_and_spread, mean_and_spread, score_in, score_name
from linrec.lab.tasks import Task, judged_by
from linrec.lab.train import Run, RunFolderError, TrainError
from linrec.lab.train.run import writing
from linrec.models.config import spelled

RESULT_FIELDS = ("parameters", "steps", "seconds", "steps_per_second")
SPLITS = ("test", "validation")
UNITS = {
    "per token": "perplexity",
    "per word": "word_perplexity",
    "per byte": "byte_perplexity",
    "bits/byte": "bits_per_byte",
}
BANDS = "Lines are means over the seeds; bands reach from the lowest to the highest seed."
SPANS = (
    "How many numbers an answer depends on, and how often it is right (GateLoop, figure 7). The picture ends "
    "a little after the longest span at which a model is above chance."
)
ON_RESULTS = (
    "Runs of a configuration differ only in their seed. Scores are mean ± standard deviation over the seeds."
)
ON_BASELINE = (
    "Better or a regression where the means differ by more than the spread: the standard deviation of the "
    "baseline's seeds, and at least a hundredth of its mean."
)
ON_PERPLEXITY = (
    "Windows of the length of training, the longest ones, and the state carried through the whole text, as "
    "far as they were evaluated. perplexity.json in the run folder has all."
)
FROM_PYTHON = "The runs were started from Python; config.json in their folders says all."
MAGNITUDES = (
    "Magnitudes of the learned state transitions over the first test sequence (GateLoop, figure 5): in each "
    "layer channels vertically, the largest average on top, and time horizontally; the narrow column "
    "enlarges the steps around one reset."
)


def write_report(
    run_dirs: Iterable[str | os.PathLike[str]],
    out_dir: str | os.PathLike[str],
    *,
    baseline: Sequence[str | os.PathLike[str]] = (),
    trust_code: bool = False,
) -> Path:
    """Write `report.html` and its pictures from run folders or tables alone.

    The pictures are learning_curves.png and, for tasks with an accuracy, accuracy_by_span.png and one
    transitions-<arm>.png per arm. Where the arms differ in one number, score_by_number.png shows their scores
    over it. For language models, the page shows the perplexities of `linrec eval`, and a sample text of each
    arm with weights. The page holds the pictures inside itself, so that it can be sent
    as one file. The page names results and checkpoints that are missing.

    Args:
        run_dirs: run folders of `linrec train`, finished or not, or tables of `collect_runs`; at least one.
            The same run counts once.
        out_dir: folder for the report; made if need be, files of the same names are replaced.
        baseline: rows or results of earlier runs to compare with; see `compare_runs`.
        trust_code: whether to import tasks and mixers that the runs name by import paths; see `load_run`.

    Returns:
        The path of the page.

    Raises:
        ValueError: there are no run folders, a run folder or the baseline cannot be read, the baseline has
            no run of the same configuration, or `out_dir` cannot be written to.

    Example:
        >>> import tempfile
        >>> from linrec.models import ModelConfig
        >>> from linrec.lab.tasks import MemoryHorizon
        >>> from linrec.lab.train import LoopConfig, TrainConfig, fit
        >>> task = MemoryHorizon(length=8, n_resets=1, n_samples=20, n_validation=4, n_test=4)
        >>> model = ModelConfig(vocab_size=6, d_model=8, n_layers=1)
        >>> loop = LoopConfig(batch_size=4, device="cpu")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = fit(TrainConfig("tiny", task, model, loop=loop), f"{folder}/run")
        ...     page = write_report([f"{folder}/run"], f"{folder}/report")
        ...     sorted(path.name for path in page.parent.iterdir())
        ['accuracy_by_span.png', 'learning_curves.png', 'report.html', 'transitions-tiny.png']
    """
    runs = read_runs(run_dirs, trust_code=trust_code)
    if not runs:
        raise RunFolderError("`run_dirs` must name at least one run folder; got none.")
    for run in runs:
        _check(run)
    arms = group_runs(runs)
    comparisons = compare_arms(arms, baseline)
    compared = {comparison.label for comparison in comparisons}
    alone = [arm.label for arm in arms if baseline and arm.results and arm.label not in compared]
    page = Path(out_dir) / "report.html"
    with writing(f"write the report to {page.parent}", RunFolderError):
        page.parent.mkdir(parents=True, exist_ok=True)
        missing: list[str] = []
        pictures, samples = Gallery.saved(_pictures(arms, missing), page.parent), _samples(arms, missing)
        missing += [f"The baseline has no run like those of {label}." for label in alone]
        commands = dict.fromkeys(filter(None, (run.about.get("command") for arm in arms for run in arm.runs)))
        blocks = [
            *_section("Results", _results(arms), ON_RESULTS),
            *_section("Against the baseline", _comparisons(comparisons), ON_BASELINE),
            *_section("Perplexity", _perplexities(arms), ON_PERPLEXITY),
            pictures,
            *samples,
            *_section("What differs", _settings(arms)),
            *_section("Runs", _runs(arms)),
            Text("heading", "Commands"),
            Text("lines", "\n".join(commands)) if commands else Text("note", FROM_PYTHON),
        ]
        title = " and ".join(dict.fromkeys(run.config.name for arm in arms for run in arm.runs))
        count = f"{len(runs)} run{'s' * (len(runs) > 1)} of {len(arms)} configuration{'s' * (len(arms) > 1)}"
        about = f"{count} · written by linrec {__version__}"
        text = render(f"{title} – linrec report", about, blocks, missing=missing, heading=title)
        write_text(page, text)
    return page


def _section(title: str, table: Table, note: str = "") -> list[Block]:
    """Return the blocks of a table, without any if it has no rows."""
    notes = [Text("note", note)] if note else []
    return [Text("heading", title), table, *notes] if table.rows else []


def means(arm: Arm) -> dict[str, str]:
    """Return the scores of an arm by the task's metric; for perplexities, also the loss per token."""
    by = arm.metric
    told = {
        f"{split} {TITLES[by]}": format_mean_and_spread(
            [score for result in arm.results if (score := score_in(by, result[split])) is not None],
            FORMATS[by],
        )
        for split in SPLITS
    }
    if by == "perplexity":
        losses = [result["validation"]["loss"] for result in arm.results if result["validation"]]
        told["validation loss"] = format_mean_and_spread(losses, FORMATS["loss"])
    return told


def _check(run: Run) -> None:
    """Refuse a result that lacks a field, as files of another origin may."""
    if run.result is None:
        return
    absent = [name for name in RESULT_FIELDS if name not in run.result]
    by = judged_by(run.config.task)
    wanted = score_name(by)
    for name in SPLITS:
        scores = run.result.get(name)
        # a text may have no such split
        if (by != "perplexity" or scores != {}) and not (
            isinstance(scores, dict) and isinstance(scores.get(wanted), float)
        ):
            absent.append(f"{name} {wanted}")
    if absent:
        raise RunFolderError(f"{run.path} cannot be reported: it lacks {', '.join(absent)}.")


def _pictures(arms: Sequence[Arm], missing: list[str]) -> list[Picture]:
    """Return the pictures, and add to `missing` a sentence for each missing part."""
    missing += [
        f"{run.path} has no result: it has not finished. It counts in no mean."
        for arm in arms
        for run in arm.runs
        if run.result is None
    ]
    classifies = any(arm.runs[0].config.task.objective == "classification" for arm in arms)
    shown = "Loss and accuracy" if classifies else "Mean squared error"
    curves, spans = draw_learning_curves(arms), draw_accuracy_by_span(arms)
    number = draw_score_by_number(arms)
    counts_right = [arm for arm in arms if arm.metric == "accuracy"]
    if curves is None:
        missing.append("No run has logged anything yet, so there are no learning curves.")
    if spans is None and any(arm.results for arm in counts_right):
        missing.append("This task's results are not split by memory span.")
    return [
        Picture("learning_curves", "Learning curves", f"{shown} while training. {BANDS}", curves),
        Picture("accuracy_by_span", "Test accuracy by required memory span", f"{SPANS} {BANDS}", spans),
        Picture("score_by_number", "Score by the number in which the runs differ", BANDS, number),
        # transitions of language models are shown by `linrec inspect`
        *filter(None, (_transitions(arm, missing) for arm in counts_right)),
    ]


def _transitions(arm: Arm, missing: list[str]) -> Picture | None:
    """Draw the transitions of an arm's first run with weights, or add to `missing` why not."""
    for run in arm.runs:
        try:
            model, task = run.model(), run.config.task
            tokens = task.split("test").rows(torch.tensor([0])).inputs[:1]
        except (TrainError, DataError) as error:
            missing.append(f"No transitions of {run.path} to draw: {error}")
            continue
        layers = inspect_model(model, tokens, token_mixing=False)
        # a task without resets has no such token
        resets = torch.eq(tokens[0], -1 if task.reset_token is None else task.reset_token)
        figure = draw_transitions(layers, resets)
        if figure is None:
            mixer = spelled(run.config.model.mixer_pattern)
            missing.append(f"The mixer {mixer!r} has no state transitions to draw.")
            return None
        caption = f"{MAGNITUDES} Seed {run.config.loop.seed}."
        if resets.any():
            mean = average(by_layer(layers, len(resets)))
            caption += (
                " Orange marks are resets. The average over channels and layers is "
                f"{mean[resets].mean():.3f} at resets and {mean[~resets].mean():.3f} elsewhere."
            )
        title = f"State transitions ({arm.label})"
        return Picture(f"transitions-{arm.slug}", title, caption, figure)
    return None


def _samples(arms: Sequence[Arm], missing: list[str]) -> list[Block]:
    """Return a sample text of the first run with weights of each arm."""
    blocks: list[Block] = []
    for arm in arms:
        for run in arm.runs if is_language_model(arm.runs[0]) else ():
            try:
                found = sample_text(run)
            except (TrainError, ValueError) as error:
                missing.append(f"No sample text of {run.path}: {error}")
                continue
            if found is not None:
                told = (
                    f"{arm.label}, seed {run.config.loop.seed}. The text continues {found['prompt']}; it was "
                    f"drawn at temperature {found['temperature']:g} with random seed {found['seed']}."
                )
                blocks += [Text("note", told), Text("verbatim", found["text"])]
                break
    return [Text("heading", "Sample text"), *blocks] if blocks else []


def _results(arms: Sequence[Arm]) -> Table:
    """Return a table of the means of every arm, and of predictors without a model."""
    rows = []
    for arm in arms:
        results, seeds = arm.results, ", ".join(map(str, arm.seeds))
        seconds = mean_and_spread([result["seconds"] for result in results]).mean if results else math.nan
        time = f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s"
        speed = format_mean_and_spread([result["steps_per_second"] for result in results], ",.1f")
        rows.append({
            "configuration": arm.label,
            **means(arm),
            "runs": f"seed{'s' * (len(results) > 1)} {seeds}" if results else "–",
            "parameters": f"{results[0]['parameters']:,}" if results else "–",
            "steps/s": speed,
            "time per run": time if results else "–",
        })  # fmt: skip
    tasks = dict.fromkeys(run.config.task for arm in arms for run in arm.runs)
    for row in (row for task in tasks for row in _without_model(task)):
        # once for tasks that differ in nothing that is shown here
        if row not in rows:
            rows.append(row)
    return Table.of(rows)


def _without_model(task: Task) -> list[dict[str, str]]:
    """Return the rows of chance and of the best constant answer."""
    by = judged_by(task)
    if by == "perplexity":
        # the most frequent token is known only from the text, which a report does not need
        return [{"configuration": "chance", "validation perplexity": f"{1 / task.chance:,.0f}"}]
    try:
        trivial = format(task.trivial_score, FORMATS[by])
    except DataError:
        # the task's files are missing
        trivial = "–"
    if by == "mse":
        return [{"configuration": "always the mean", f"test {TITLES[by]}": trivial}]
    return [
        {"configuration": "always the most frequent answer", f"test {TITLES[by]}": trivial},
        {"configuration": "chance", f"test {TITLES[by]}": format(task.chance, FORMATS[by])},
    ]


def _comparisons(comparisons: Sequence[Comparison]) -> Table:
    """Return a table of configurations beside their baselines, regressions first."""
    rows = [
        {
            "configuration": found.label,
            "score": format_mean_and_spread(found.scores, FORMATS[found.metric]),
            "baseline": format_mean_and_spread(found.baseline, FORMATS[found.metric]),
            "spread": f"{found.spread:.2g}",
            "metric": found.metric,
            "verdict": found.verdict,
        }
        for found in sorted(comparisons, key=lambda found: found.verdict != "regression")
    ]
    return Table.of(rows, range(1, 4))


def _perplexities(arms: Sequence[Arm]) -> Table:
    """Return a table of the perplexities that `linrec eval` found; most lengths are left out."""
    rows = []
    for label, run in [(arm.label, run) for arm in arms for run in arm.runs if "perplexity" in run.extra]:
        found = run.extra["perplexity"]
        split = f", {found['split']}" if found.get("split") else ""
        windows = [score["length"] for score in found["scores"] if score["length"] is not None]
        shown = {found["trained_length"], max(windows, default=None), None}
        rows += [
            {
                "folder": run.path.name or str(run.path),
                "configuration": label,
                "text": f"{Path(found['data']).name}{split}",
                "window": "carried" if score["length"] is None else f"{score['length']:,}",
                **{title: "–" if score[of] is None else f"{score[of]:,.3f}" for title, of in UNITS.items()},
            }
            for score in found["scores"]
            if score["length"] in shown
        ]
    return Table.of(rows, range(3, 8))


def _settings(arms: Sequence[Arm]) -> Table:
    rows = [
        {"setting": name, **{arm.label: str(arm.settings[name]) for arm in arms}} for name in arms[0].settings
    ]
    return Table.of(rows, range(0))


def _runs(arms: Sequence[Arm]) -> Table:
    rows = []
    for label, run in [(arm.label, run) for arm in arms for run in arm.runs]:
        result, by = run.result, judged_by(run.config.task)
        logged = [record for record in run.metrics if record["split"] == "validation"]
        step = max((record["step"] for record in run.metrics), default=0)
        rows.append({
            "folder": run.path.name or str(run.path),
            "seed": str(run.config.loop.seed),
            "test": _score(by, result["test"] if result else {}),
            "validation": _score(by, result["validation"] if result else logged[-1] if logged else {}),
            "steps": f"{result['steps'] if result else step:,}",
            "minutes": f"{result['seconds'] / 60:.1f}" if result else "–",
            "configuration": label,
            "device": run.about.get("device", {}).get("name", "–"),
            "commit": (run.about.get("commit") or "–")[:10] + " + changes" * bool(run.about.get("dirty")),
        })  # fmt: skip
    return Table.of(rows, range(1, 6))


def _score(metric: str, scores: Mapping[str, Any]) -> str:
    """Return the metric of a split, the loss where the metric follows from it, or a dash without either."""
    name = score_name(metric)
    if name not in scores:
        return "–"
    if metric == "mse":
        return f"{scores[name]:.4g}"
    return f"{scores[name]:.4f}" + (" nats" if name == "loss" else "")
