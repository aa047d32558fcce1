"""The report: from run folders or tables to a page and its pictures."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from linrec.errors import DataError
from linrec.files import write_text
from linrec.lab.report import style
from linrec.lab.report.arms import Arm, group_runs
from linrec.lab.report.baseline import compare_arms
from linrec.lab.report.by_number import draw_score_by_number
from linrec.lab.report.curves import draw_learning_curves
from linrec.lab.report.markup import Picture
from linrec.lab.report.page import Sample, render_page
from linrec.lab.report.sample import is_language_model, sample_text
from linrec.lab.report.spans import draw_accuracy_by_span
from linrec.lab.report.stored import read_runs
from linrec.lab.report.transitions import draw_transitions, transition_magnitudes
from linrec.lab.tasks import judged_by
from linrec.lab.train import Run, RunFolderError, TrainError
from linrec.models.config import spelled

RESULT_FIELDS = ("parameters", "steps", "seconds", "steps_per_second")
SPLITS = ("test", "validation")
BANDS = "Lines are means over the seeds; bands reach from the lowest to the highest seed."
SPANS = (
    "How many numbers an answer depends on, and how often it is right (GateLoop, figure 7). The picture ends "
    "a little after the longest span at which a model is above chance."
)
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
    out = Path(out_dir)
    try:
        out.mkdir(parents=True, exist_ok=True)
        pictures, missing = _draw(arms, out)
        samples = _samples(arms, missing)
        missing += [f"The baseline has no run like those of {label}." for label in alone]
        page = out / "report.html"
        write_text(page, render_page(arms, pictures, missing, comparisons, samples))
    except OSError as error:
        raise RunFolderError(f"could not write the report to {out}: {error.strerror or error}.") from error
    return page


def _check(run: Run) -> None:
    """Refuse a result that lacks a field, as files of another origin may."""
    absent = []
    if run.result is not None:
        absent += [name for name in RESULT_FIELDS if name not in run.result]
        by = judged_by(run.config.task)
        wanted = "accuracy" if by == "accuracy" else "loss"
        absent += [
            f"{name} {wanted}"
            for name in SPLITS
            # a text may have no such split
            if (by != "perplexity" or run.result.get(name) != {}) and not _has(run.result.get(name), wanted)
        ]
    if absent:
        raise RunFolderError(f"{run.path} cannot be reported: it lacks {', '.join(absent)}.")


def _has(scores: Any, wanted: str) -> bool:
    return isinstance(scores, dict) and isinstance(scores.get(wanted), float)


def _draw(arms: Sequence[Arm], out: Path) -> tuple[list[Picture], list[str]]:
    pictures, missing = [], _unfinished(arms)
    if (figure := draw_learning_curves(arms)) is not None:
        path = style.save(figure, out / "learning_curves.png")
        shown = "Loss and accuracy" if any(map(_classifies, arms)) else "Mean squared error"
        pictures.append(Picture(path, "Learning curves", f"{shown} while training. {BANDS}"))
    else:
        missing.append("No run has logged anything yet, so there are no learning curves.")
    if (figure := draw_accuracy_by_span(arms)) is not None:
        path = style.save(figure, out / "accuracy_by_span.png")
        pictures.append(Picture(path, "Test accuracy by required memory span", f"{SPANS} {BANDS}"))
    elif any(arm.results for arm in arms if _counts_right(arm)):
        missing.append("This task's results are not split by memory span.")
    if (figure := draw_score_by_number(arms)) is not None:
        path = style.save(figure, out / "score_by_number.png")
        pictures.append(Picture(path, "Score by the number in which the runs differ", BANDS))
    # transitions of language models are shown by `linrec inspect`
    for arm in filter(_counts_right, arms):
        picture = _draw_transitions(arm, out, missing)
        if picture is not None:
            pictures.append(picture)
    return pictures, missing


def _counts_right(arm: Arm) -> bool:
    return judged_by(arm.runs[0].config.task) == "accuracy"


def _classifies(arm: Arm) -> bool:
    return arm.runs[0].config.task.objective == "classification"


def _samples(arms: Sequence[Arm], missing: list[str]) -> list[Sample]:
    """Return a sample text of the first run with weights of each arm."""
    samples = []
    for arm in filter(_is_language_model, arms):
        for run in arm.runs:
            try:
                found = sample_text(run)
            except (TrainError, ValueError) as error:
                missing.append(f"No sample text of {run.path}: {error}")
                continue
            if found is not None:
                samples.append(Sample(arm.label, run.config.loop.seed, found))
                break
    return samples


def _is_language_model(arm: Arm) -> bool:
    return is_language_model(arm.runs[0])


def _unfinished(arms: Sequence[Arm]) -> list[str]:
    return [
        f"{run.path} has no result: it has not finished. It counts in no mean."
        for arm in arms
        for run in arm.runs
        if run.result is None
    ]


def _draw_transitions(arm: Arm, out: Path, missing: list[str]) -> Picture | None:
    for run in arm.runs:
        try:
            model, task = run.model(), run.config.task
            tokens = task.split("test").rows(torch.tensor([0])).inputs[0]
        except (TrainError, DataError) as error:
            missing.append(f"No transitions of {run.path} to draw: {error}")
            continue
        magnitudes = transition_magnitudes(model, tokens, task.reset_token)
        if magnitudes is None:
            mixer = spelled(run.config.model.mixer_pattern)
            missing.append(f"The mixer {mixer!r} has no state transitions to draw.")
            return None
        path = style.save(draw_transitions(magnitudes), out / f"transitions-{arm.slug}.png")
        caption = f"{MAGNITUDES} Seed {run.config.loop.seed}."
        if magnitudes.resets.any():
            caption += (
                " Orange marks are resets. The average over channels and layers is "
                f"{magnitudes.at_resets:.3f} at resets and {magnitudes.elsewhere:.3f} elsewhere."
            )
        return Picture(path, f"State transitions ({arm.label})", caption)
    return None
