"""Evaluation of a run folder's model, written to files."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from matplotlib.figure import Figure

from linrec.lab.corpora.corpus import ReadingDisplay
from linrec.lab.evaluation.lengths import default_lengths
from linrec.lab.evaluation.perplexity import BATCH_TOKENS, Score, evaluate_carried, evaluate_windows
from linrec.lab.evaluation.text import ChosenText
from linrec.lab.report import style
from linrec.lab.report.perplexity import FILE, draw_perplexity
from linrec.lab.train import ConfigError, Run, RunFolderError
from linrec.lab.train.records import provenance
from linrec.lab.train.run import language_task, tokenizer_of, write_json
from linrec.literals import Precision

__all__ = ["Evaluation", "evaluate_run"]

PICTURE = "perplexity.png"


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate_run`.

    Args:
        text: the text that the model was evaluated on.
        trained: tokens of context in training.
        scores: a score for each length, ascending; then the score with carried state, if requested.
        folder: the folder of perplexity.json and perplexity.png.
    """

    text: ChosenText
    trained: int
    scores: tuple[Score, ...]
    folder: Path


def evaluate_run(
    run: Run,
    text: ChosenText,
    *,
    lengths: Sequence[int] | None = None,
    carry: bool = False,
    out: str | os.PathLike[str] | None = None,
    device: torch.device | str = "cpu",
    precision: Precision = "32-true",
    batch_tokens: int = BATCH_TOKENS,
    display: ReadingDisplay | None = None,
    command: str | None = None,
) -> Evaluation:
    """Measure the perplexity of a language model for several window lengths, and write the results to files.

    Args:
        run: a run from `linrec.lab.train.load_run`.
        text: a text from `choose_text` for this run.
        lengths: tokens per window; None is `default_lengths`.
        carry: whether to also evaluate with the state carried through the whole text.
        out: folder for the results; None is the run folder. Files of the same names are replaced.
        device: device to compute on.
        precision: "32-true" or "bf16-mixed".
        batch_tokens: tokens that go through the model at once; bounds the memory.
        display: shows progress; None shows progress on standard error.
        command: the command line to record, if any.

    Returns:
        The scores and their folder. `perplexity.json` holds the scores, the text's counts, the device, the
        commit and versions; `perplexity.png` is a plot of the scores. Both files are written atomically after
        the last measurement.

    Raises:
        ConfigError: the text is too short for a length, or the run did not train a language model.
        RunFolderError: the run has no checkpoint yet, or the results cannot be written.
        CheckpointError: no checkpoint is usable.
        TrainError: `perplexity.json` cannot be written, for example because the disk is full.

    Source:
        HGRN (Qin, Yang and Zhong, 2023), table 14.
    """
    display = ReadingDisplay() if display is None else display
    if batch_tokens < 1:
        raise ConfigError(f"`batch_tokens` must be at least 1; got {batch_tokens}.")
    trained, tokens = language_task(run).length, text.tokens
    chosen = _lengths(text, trained, lengths)
    folder = run.path if out is None else Path(out)
    model = run.model(device)
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)

    windows = partial(evaluate_windows, model, tokens, batch_tokens=batch_tokens, precision=precision)
    measures = [(f"windows of {length:,}", partial(windows, length)) for length in chosen]
    if carry:
        whole = partial(evaluate_carried, model, tokens, batch_tokens=batch_tokens, precision=precision)
        measures += [("the whole text, state carried", whole)]
    scores = []
    for title, measure in measures:
        with display.reading(title, len(tokens.ids) - 1) as advance:
            scores.append(measure(advance=advance))

    found = Evaluation(text, trained, tuple(scores), folder)
    content = {
        "run": str(run.path),
        "recipe": run.config.name,
        "data": text.source,
        "split": text.split,
        "documents": tokens.starts is not None,
        "tokenizer": tokenizer_of(run).name,
        "text": dataclasses.asdict(tokens.counts),
        "trained_length": trained,
        "scores": [score.to_dict() for score in scores],
        "precision": precision,
        "batch_tokens": batch_tokens,
        "command": command,
        **provenance(torch.device(device)),
    }
    with _writing(folder):
        style.save(_drawn(found), folder / PICTURE)
    write_json(folder / FILE, content)
    return found


def _lengths(text: ChosenText, trained: int, lengths: Sequence[int] | None) -> tuple[int, ...]:
    n_tokens = len(text.tokens.ids)
    if n_tokens < 2:
        raise ConfigError(
            f"{text.title} must have at least 2 tokens, to predict the second; it has {n_tokens}."
        )
    if lengths is None:
        return default_lengths(trained, n_tokens)
    if not lengths:
        raise ConfigError("`lengths` must contain at least one length; got an empty sequence.")
    for length in lengths:
        if not 1 <= length < n_tokens:
            raise ConfigError(
                f"lengths must be at least 1 and less than the {n_tokens:,} tokens of {text.title}; "
                f"got {length:,}."
            )
    return tuple(sorted(set(lengths)))


def _drawn(found: Evaluation) -> Figure:
    windows = [(score.length, score.perplexity) for score in found.scores if score.length is not None]
    carried = next((score.perplexity for score in found.scores if score.length is None), None)
    lengths, perplexities = zip(*windows, strict=True)
    return draw_perplexity(lengths, perplexities, trained=found.trained, carried=carried)


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunFolderError(f"could not write to {folder}: {error.strerror or error}.") from error
