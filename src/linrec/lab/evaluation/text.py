"""The choice of the text that a language model is evaluated on: the run's own text, or another text."""

import dataclasses
import os
from pathlib import Path
from typing import NamedTuple

from linrec.lab.tasks import LanguageModeling, SplitName, TokenSplit
from linrec.lab.tasks.base import SPLIT_NAMES
from linrec.lab.train import ConfigError, Run
from linrec.lab.train.run import language_task, tokenizer_of
from linrec.text import CharacterTokenizer, DataError, Tokenizer

__all__ = ["ChosenText", "choose_text"]

HELD_OUT: tuple[SplitName, ...] = ("test", "validation")


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
