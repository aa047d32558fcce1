"""The task and the tokenizer of a language model's run."""

from linrec.errors import ConfigError
from linrec.lab.tasks import LanguageModeling
from linrec.lab.train.run import Run
from linrec.text import Tokenizer, read_tokenizer

__all__ = ["language_task", "tokenizer_of"]


def language_task(run: Run) -> LanguageModeling:
    """Return the task of a run that trained a language model.

    Args:
        run: the run.

    Raises:
        ConfigError: the run did not train a language model.
    """
    task = run.config.task
    if not isinstance(task, LanguageModeling):
        raise ConfigError(
            f"{run.path} is not a language model: it was trained on {type(task).__name__}, which has no text."
        )
    return task


def tokenizer_of(run: Run) -> Tokenizer:
    """Return the tokenizer stored in a run folder.

    Args:
        run: the run.

    Raises:
        ConfigError: the run was trained with another tokenizer, or its model does not take tokens.
        DataError: the folder has no tokenizer.
    """
    tokenizer, vocab_size = read_tokenizer(run.path), run.config.model.vocab_size
    if vocab_size is None:
        raise ConfigError(f"{run.path} is not a language model: its model does not take tokens.")
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"the tokenizer in {run.path} has {tokenizer.vocab_size:,} tokens, but its model has "
            f"{vocab_size:,}. Restore the tokenizer that the run was trained with."
        )
    trained_with = run.about.get("tokenizer", tokenizer.fingerprint)
    if tokenizer.fingerprint != trained_with:
        raise ConfigError(
            f"the tokenizer in {run.path} has the fingerprint {tokenizer.fingerprint}, but the run was "
            f"trained with the fingerprint {trained_with}. "
            "Restore the tokenizer that the run was trained with."
        )
    return tokenizer
