"""Sample text of language models: a short continuation that the weights write."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from linrec.errors import DataError, RunFolderError
from linrec.field_types import check_types
from linrec.generation import stream
from linrec.lab.tasks import LanguageModeling
from linrec.lab.train import Run
from linrec.lab.train.checkpoint import BEST, CURRENT, PREVIOUS
from linrec.lab.train.run import tokenizer_of
from linrec.text import Tokenizer

__all__ = ["SAMPLE", "check_sample", "has_weights", "is_language_model", "sample_text"]

SAMPLE = "sample"
TOKENS = 200
TEMPERATURE = 0.8
SEED = 0
FIELDS = {"prompt": str, "temperature": float, "seed": int}


def sample_text(run: Run) -> Mapping[str, Any] | None:
    """Return a text of at most 200 tokens that a language model writes, or the text that its table keeps.

    The prompt is the end of a document or, for a tokenizer without that token, a newline. The same weights
    give the same text on the same machine.

    Args:
        run: a run of any task.

    Returns:
        "text", and "prompt", "temperature" and "seed" that made it; None for another task, and for a run
        without weights.

    Raises:
        CheckpointError: no checkpoint is usable.
        DataError: the run folder has no tokenizer.
        ConfigError: the tokenizer is not the one of training.
        ValueError: the model's outputs are not finite.
    """
    if SAMPLE in run.extra:
        kept: Mapping[str, Any] = run.extra[SAMPLE]
        return kept
    if not is_language_model(run) or not has_weights(run.path):
        return None
    tokenizer, model = tokenizer_of(run), run.model()
    prompt, described = _prompt(tokenizer)
    generated = stream(
        model,
        torch.tensor([[prompt]]),
        temperature=TEMPERATURE,
        seed=SEED,
        vocab_size=tokenizer.vocab_size,
    )
    numbers = (int(token) for token in itertools.islice(generated, TOKENS))
    tokens = [*itertools.takewhile(lambda token: token != tokenizer.end_of_document, numbers)]
    return {
        "text": tokenizer.decode(tokens),
        **{"prompt": described, "temperature": TEMPERATURE, "seed": SEED},
    }


def is_language_model(run: Run) -> bool:
    """Return whether a run trained a language model."""
    return isinstance(run.config.task, LanguageModeling)


def has_weights(folder: Path) -> bool:
    """Return whether a run folder has a checkpoint, usable or not."""
    return any((folder / name).exists() for name in (BEST, CURRENT, PREVIOUS))


def check_sample(content: Any, path: Path) -> None:
    """Refuse a sample of a table that lacks a field.

    Raises:
        RunFolderError: a field is missing or has another type.
    """
    try:
        check_types({SAMPLE: dict}, {SAMPLE: content})
        check_types(FIELDS, content, f"{SAMPLE}.")
        # a text has control characters, which no other field may have
        if not isinstance(content.get("text"), str):
            raise TypeError(f"`{SAMPLE}.text` must be a text.")
    except TypeError as error:
        raise RunFolderError(f"the row of {path} cannot be used: {error}") from error
    if missing := [name for name in FIELDS if name not in content]:
        raise RunFolderError(f"the row of {path} cannot be used: its sample has no {missing[0]!r}.")


def _prompt(tokenizer: Tokenizer) -> tuple[int, str]:
    """Return the token that the text continues, and its description."""
    if tokenizer.end_of_document is not None:
        return tokenizer.end_of_document, "the end of a document"
    try:
        return int(tokenizer.encode("\n")[0]), "a newline"
    except (DataError, IndexError):
        return 0, repr(tokenizer.decode([0]))
