"""The tokens to inspect a run on: from a text, or from the task that the run was trained on."""

import functools
import os
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int64
from matplotlib import font_manager
from matplotlib.ft2font import FT2Font
from numpy.typing import NDArray
from torch import Tensor

from linrec.lab.evaluation import choose_text
from linrec.lab.tasks import LanguageModeling, SplitName
from linrec.lab.tasks.base import Task
from linrec.lab.train import ConfigError, Run
from linrec.lab.train.run import language_task, tokenizer_of
from linrec.text import Tokenizer

__all__ = ["InspectedTokens", "choose_tokens"]

# symbols for invisible characters, and for tokens without text
VISIBLE = {" ": "␣", "\n": "↵", "\t": "→", "\r": "←"}
NO_TEXT = "∎"
UNKNOWN = "\ufffd"
# longer names of tokens are truncated
LETTERS = 12


@dataclass(frozen=True, eq=False)
class InspectedTokens:
    """A sequence to inspect a run on.

    Args:
        tokens: shape (1, t), int64.
        reset: true where a document begins, shape (1, t), bool; None if the run does not use documents.
        labels: names of the t tokens in pictures.
        source: description of the origin of the sequence.
        text: the decoded text; None if the tokens are not text.
        of: number of tokens in the source, of which these are the first.
    """

    tokens: Int64[Tensor, "1 t"]
    reset: Bool[Tensor, "1 t"] | None
    labels: tuple[str, ...]
    source: str
    text: str | None
    of: int


def choose_tokens(
    run: Run,
    n_tokens: int,
    *,
    prompt: str | None = None,
    path: str | os.PathLike[str] | None = None,
    split: SplitName | None = None,
) -> InspectedTokens:
    """Return the first tokens of a text, or of the first sequence of a task.

    Args:
        run: the run.
        n_tokens: maximal number of tokens; at least 2.
        prompt: the text itself.
        path: a text file, a folder or a glob. Without `path` and `prompt`, the text or the task that the run
            was trained on is used.
        split: name of the split; None means a held-out split. For a text it is "test" if that exists, else
            "validation"; for other tasks it is "validation".

    Raises:
        ConfigError: fewer than 2 tokens, `prompt` together with `path` or `split`, or `prompt` or `path` for
            a run that was not trained on text.
        DataError: the text does not exist, is empty, or cannot be tokenised.
    """
    if prompt is not None and (path is not None or split is not None):
        raise ConfigError("--prompt replaces the text; leave out --data.path and --split with it.")
    if n_tokens < 2:
        raise ConfigError(f"--tokens must be at least 2, so that one can affect another; got {n_tokens}.")
    if prompt is not None:
        language_task(run)
        tokenizer = tokenizer_of(run)
        chosen = _of_text(tokenizer, tokenizer.encode(prompt), n_tokens, "the prompt", None)
    elif path is not None or isinstance(run.config.task, LanguageModeling):
        text = choose_text(run, path=path, split=split)
        chosen = _of_text(tokenizer_of(run), text.tokens.tokens(), n_tokens, text.title, text.tokens.starts)
    else:
        chosen = _of_task(run.config.task, n_tokens, "validation" if split is None else split)
    if chosen.tokens.shape[1] < 2:
        raise ConfigError(
            f"{chosen.source} must have at least 2 tokens, so that one can affect another; got {chosen.of}. "
            "Pass a longer text."
        )
    return chosen


def _of_text(
    tokenizer: Tokenizer,
    ids: NDArray[np.unsignedinteger],
    n_tokens: int,
    source: str,
    starts: Tensor | None,
) -> InspectedTokens:
    listed = ids[:n_tokens].tolist()
    return InspectedTokens(
        tokens=torch.tensor([listed], dtype=torch.int64),
        reset=None if starts is None else torch.isin(torch.arange(len(listed)), starts)[None],
        labels=tuple(_label(tokenizer, token) for token in listed),
        source=source,
        text=tokenizer.decode(listed),
        of=len(ids),
    )


def _of_task(task: Task, n_tokens: int, split: SplitName) -> InspectedTokens:
    inputs, _, reset, *_ = task.split(split).rows(torch.tensor([0]))
    listed = inputs[0, :n_tokens].tolist()
    return InspectedTokens(
        tokens=inputs[:, :n_tokens],
        reset=None if reset is None else reset[:, :n_tokens],
        labels=tuple("R" if token == task.reset_token else str(token) for token in listed),
        source=f"the first {split} sequence of {type(task).__name__}",
        text=None,
        of=inputs.shape[1],
    )


def _label(tokenizer: Tokenizer, token: int) -> str:
    text = tokenizer.decode([token])
    if not text:
        return NO_TEXT
    drawn = "".join(_drawable(VISIBLE.get(character, character)) for character in text)
    return drawn if len(drawn) <= LETTERS else drawn[: LETTERS - 1] + "…"


def _drawable(character: str) -> str:
    """Return the character, or a replacement if the font of the pictures lacks it."""
    return character if ord(character) in _letters() else UNKNOWN


@functools.cache
def _letters() -> frozenset[int]:
    return frozenset(FT2Font(font_manager.findfont("DejaVu Sans")).get_charmap())
