"""The text that a language model is evaluated on: that of its own run, or another."""

import dataclasses
import os
from pathlib import Path
from typing import NamedTuple

from linrec.tasks import LanguageModeling, SplitName, TokenSplit
from linrec.tasks.base import SPLIT_NAMES
from linrec.text import CharacterTokenizer, DataError, Tokenizer
from linrec.train import ConfigError, Run
from linrec.train.language import language_task, tokenizer_of

__all__ = ["ChosenText", "choose_text"]

HELD_OUT: tuple[SplitName, ...] = ("test", "validation")


class ChosenText(NamedTuple):
    """A text in the tokens of a run.

    Args:
        tokens: its tokens.
        source: where it is from.
        split: which split of the source; None where all of the text was taken.
    """

    tokens: TokenSplit
    source: str
    split: SplitName | None

    @property
    def title(self) -> str:
        """What it is called in messages and tables, such as "the test split of wiki"."""
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
    """Return a text in the tokens of the tokenizer in a run's folder: the run's own text, or another.

    Of another text nothing is cut: a source without splits is taken whole. The text is tokenised once, as
    `linrec.tasks.LanguageModeling` says, and divided into documents if the run's own is.

    Args:
        run: the run of a language model.
        path: a text file, a folder of text files, or a glob.
        dataset: name or path of a data set of Hugging Face. Where neither is given, the run's own text is
            taken.
        dataset_config: which configuration of `dataset`, where it has several.
        text_column: the column of `dataset` that holds the text.
        split: which split; None is "test" where there is one, and else "validation".

    Raises:
        ConfigError: the run trained no language model, its tokenizer does not fit its model, or there is no
            such split.
        DataError: the text is not there, is empty, or cannot be tokenised; or both `path` and `dataset` are
            given.

    Example:
        >>> import tempfile
        >>> from linrec.models import ModelConfig
        >>> from linrec.text import ByteTokenizer
        >>> from linrec.train import TrainConfig
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
    # the run's tokenizer is in its folder, wherever it came from when the run began
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
        raise ConfigError(f"{_source(task)} has no splits, all of its text is evaluated; leave --split out.")
    return ChosenText(there["train"], _source(task), None)


def _has_tokens_of(task: LanguageModeling, tokenizer: Tokenizer) -> bool:
    """Tell whether a task of characters has a tokenizer's tokens, so that training left the shards to use.

    Shards of characters are found by the text, shards of other tokenizers by the tokenizer.
    """
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
