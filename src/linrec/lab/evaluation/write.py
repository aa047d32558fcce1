"""Evaluation of a run's model on a text: the choice of text and window lengths, and the written files."""

import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

from linrec.errors import ConfigError, RunFolderError
from linrec.lab import style
from linrec.lab.corpora.corpus import ReadingDisplay
from linrec.lab.evaluation.perplexity import BATCH_TOKENS, Score, evaluate_carried, evaluate_windows
from linrec.lab.tasks import LanguageModeling, SplitName, TokenSplit
from linrec.lab.tasks.base import SPLIT_NAMES
from linrec.lab.train import Run
from linrec.lab.train.records import provenance
from linrec.lab.train.run import language_task, tokenizer_of, write_json, writing
from linrec.literals import Precision
from linrec.text import CharacterTokenizer, DataError, Tokenizer

PERPLEXITY = "perplexity.json"
PICTURE = "perplexity.png"
HELD_OUT: tuple[SplitName, ...] = ("test", "validation")
TABLE_14 = (*range(512, 2048, 256), *range(2048, 14336 + 1, 1024))


class ChosenText(NamedTuple):
    """A text, tokenised with a run's tokenizer.

    Args:
        tokens: the tokens of the text.
        source: path or name of the data set.
        split: split of the source; None for the whole text.
    """

    tokens: TokenSplit
    source: str
    split: SplitName | None

    @property
    def title(self) -> str:
        """The title of the text in messages and tables, such as "the test split of wiki"."""
        name = Path(self.source).name or self.source
        return name if self.split is None else f"the {self.split} split of {name}"


def choose_text(
    run: Run,
    *,
    path: str | os.PathLike[str] | None = None,
    dataset: str | None = None,
    dataset_config: str | None = None,
    text_column: str = "text",
    split: SplitName | None = None,
) -> ChosenText:
    """Return a text, tokenised with the tokenizer in a run's folder: the run's own text, or another text.

    Another text without splits is used as a whole. The text is tokenised once and then cached; see
    `linrec.lab.tasks.LanguageModeling`. It is divided into documents if the run's own text is.

    Args:
        run: the run of a language model.
        path: a text file, a folder of text files, or a glob.
        dataset: name or path of a Hugging Face data set. Without `path` and `dataset`, the run's own text is
            used.
        dataset_config: configuration of `dataset`, if it has several.
        text_column: column of `dataset` that holds the text.
        split: the split; None is "test", or "validation" if there is no test split.

    Raises:
        ConfigError: the run did not train a language model, its tokenizer does not fit its model, or the text
            does not have this split.
        DataError: the text does not exist, is empty, or cannot be tokenised; or both `path` and `dataset` are
            given.

    Example:
        >>> import tempfile
        >>> from linrec.models import ModelConfig
        >>> from linrec.text import ByteTokenizer
        >>> from linrec.lab.train import TrainConfig
        >>> folder = Path(tempfile.mkdtemp())
        >>> ByteTokenizer().save(folder)
        >>> _ = (folder / "rose.txt").write_text("a rose is a rose")
        >>> task = LanguageModeling(path=folder / "rose.txt", cache=folder, vocab_size=257)
        >>> run = Run(folder, TrainConfig("rose", task, ModelConfig(vocab_size=257)), [], None, {})
        >>> text = choose_text(run, path=folder / "rose.txt")
        >>> text.tokens.counts.words, text.title
        (5, 'rose.txt')
    """
    trained_on, tokenizer = language_task(run), tokenizer_of(run)
    # the run's folder holds a copy of its tokenizer, so the original is not needed
    task = dataclasses.replace(trained_on, tokenizer=str(run.path.absolute()), vocab_size=None)
    if path is None and dataset is None:
        try:
            there = _splits(trained_on if _has_tokens_of(trained_on, tokenizer) else task)
        except DataError as error:
            raise ConfigError(
                f"the text of {run.path} cannot be used: {error} Or pass --data FILE."
            ) from error
        return _chosen(task, there, split)
    task = dataclasses.replace(
        task,
        path=None if path is None else Path(path),
        dataset=dataset,
        dataset_config=dataset_config,
        text_column=text_column,
        validation_share=0.0,
        test_share=0.0,
    )
    there = _splits(task)
    if tuple(there) != ("train",):
        return _chosen(task, there, split)
    if split not in (None, "train"):
        raise ConfigError(f"{_source(task)} has no splits, so it is evaluated as a whole; leave --split out.")
    return ChosenText(there["train"], _source(task), None)


def parse_lengths(text: str) -> tuple[int, ...]:
    """Return the lengths of a list such as "512,768,...,2048,3072,...,14336".

    Three dots continue the two lengths before them in equal steps, up to the length after them.

    Args:
        text: positive integers and three dots, separated by commas.

    Returns:
        The distinct lengths, ascending.

    Raises:
        ConfigError: the text is not a valid list.

    Example:
        >>> parse_lengths("512,768,...,1536,4096")
        (512, 768, 1024, 1280, 1536, 4096)
    """
    lengths: list[int] = []
    words = [word.strip() for word in text.split(",")]
    for place, word in enumerate(words):
        if word == "...":
            lengths += _between(lengths, words[place + 1 : place + 2])
            continue
        if not word.isdecimal() or int(word) < 1:
            raise ConfigError(
                f"--lengths must be positive numbers separated by commas, such as 512,1024; got {word!r}."
            )
        lengths.append(int(word))
    return tuple(sorted(set(lengths)))


def default_lengths(trained: int, n_tokens: int) -> tuple[int, ...]:
    """Return the lengths of HGRN's table 14 and the training length, as far as they fit into a text.

    Args:
        trained: tokens of context in training.
        n_tokens: tokens of the text; a window of length n needs n + 1 tokens.

    Returns:
        The lengths, ascending. If the text is too short for all lengths, `n_tokens - 1` is the only length.

    Source:
        HGRN (Qin, Yang and Zhong, 2023), table 14.

    Example:
        >>> default_lengths(256, n_tokens=1000), default_lengths(512, n_tokens=100)
        ((256, 512, 768), (99,))
    """
    lengths = sorted({trained, *TABLE_14})
    return tuple(length for length in lengths if length < n_tokens) or (n_tokens - 1,)


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
    command: str | None = None,
) -> Evaluation:
    """Measure the perplexity of a language model for several window lengths, and write the results to files.

    Progress is shown on standard error.

    Args:
        run: a run from `linrec.lab.train.load_run`.
        text: a text from `choose_text` for this run.
        lengths: tokens per window; None is `default_lengths`.
        carry: whether to also evaluate with the state carried through the whole text.
        out: folder for the results; None is the run folder. Files of the same names are replaced.
        device: device to compute on.
        precision: "32-true" or "bf16-mixed".
        batch_tokens: tokens that go through the model at once; bounds the memory.
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
    if batch_tokens < 1:
        raise ConfigError(f"`batch_tokens` must be at least 1; got {batch_tokens}.")
    trained, tokens = language_task(run).length, text.tokens
    chosen = _lengths(text, trained, lengths)
    folder = run.path if out is None else Path(out)
    model = run.model(device)
    with writing(f"write to {folder}", RunFolderError):
        folder.mkdir(parents=True, exist_ok=True)

    windows = partial(evaluate_windows, model, tokens, batch_tokens=batch_tokens, precision=precision)
    measures = [(f"windows of {length:,}", partial(windows, length)) for length in chosen]
    if carry:
        whole = partial(evaluate_carried, model, tokens, batch_tokens=batch_tokens, precision=precision)
        measures += [("the whole text, state carried", whole)]
    display, scores = ReadingDisplay(), []
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
    with writing(f"write to {folder}", RunFolderError):
        style.save(draw_perplexity(scores, trained), folder / PICTURE)
    write_json(folder / PERPLEXITY, content)
    return found


def draw_perplexity(scores: Sequence[Score], trained: int) -> Figure:
    """Draw perplexity over window length, with the training length and the carried state's value."""
    lengths = [score.length for score in scores if score.length is not None]
    perplexities = [score.perplexity for score in scores if score.length is not None]
    finite = [score.perplexity for score in scores if math.isfinite(score.perplexity)]
    figure = style.make_figure(height=3.4)
    axes = figure.subplots()
    axes.plot(lengths, perplexities, "o-", color=style.colour(0), markersize=4, label="windows")
    mark = f"length in training: {trained:,}"
    axes.axvline(trained, color=style.GREY, linewidth=1, linestyle=style.DASHED, label=mark)
    for score in scores:
        if score.length is None and score.perplexity in finite:
            axes.axhline(
                score.perplexity, color=style.colour(1), label="state carried through the whole text"
            )
            # a line across the picture leaves no margin of its own
            axes.update_datalim([(lengths[0], score.perplexity)])
            axes.autoscale_view()
    style.finish_axes(axes, x="tokens of a window", y="perplexity per token")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=10))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())
    if finite and max(finite) > 10 * min(finite):
        axes.set_yscale("log")
    style.add_legend(figure, axes.lines)
    return figure


def _has_tokens_of(task: LanguageModeling, tokenizer: Tokenizer) -> bool:
    """Return whether a task of characters, whose shards the text names, has the tokenizer's tokens."""
    if task.tokenizer != CharacterTokenizer.name:
        return False
    return task.tokenizer_object().fingerprint == tokenizer.fingerprint


def _splits(task: LanguageModeling) -> dict[SplitName, TokenSplit]:
    """Return the splits that have text."""
    splits = {name: task.split(name) for name in SPLIT_NAMES}
    return {name: tokens for name, tokens in splits.items() if tokens.counts.tokens}


def _chosen(
    task: LanguageModeling, there: dict[SplitName, TokenSplit], split: SplitName | None
) -> ChosenText:
    for name in HELD_OUT if split is None else (split,):
        if name in there:
            return ChosenText(there[name], _source(task), name)
    asked = "neither test nor validation data" if split is None else f"no {split} data"
    raise ConfigError(
        f"{_source(task)} has {asked}, only {', '.join(there)}; pass another --split, or --data FILE."
    )


def _source(task: LanguageModeling) -> str:
    return str(task.path if task.path is not None else task.dataset)


def _between(before: Sequence[int], after: Sequence[str]) -> list[int]:
    """Return the lengths that replace three dots."""
    end = int(after[0]) if after and after[0].isdecimal() else 0
    step = before[-1] - before[-2] if len(before) > 1 else 0
    if step <= 0 or end <= before[-1] or (end - before[-1]) % step:
        raise ConfigError(
            "--lengths: three dots must follow two lengths, whose difference is the step, and precede a "
            f"length that is reached in equal steps, as in 512,768,...,1536; got "
            f"{','.join(map(str, [*before[-2:], '...', *after]))}."
        )
    return list(range(before[-1] + step, end, step))


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
