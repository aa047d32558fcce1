"""What a run of a language model has beside its weights: a text that it was trained on, and a tokenizer."""

from linrec.errors import ConfigError
from linrec.tasks import LanguageModeling
from linrec.text import Tokenizer, read_tokenizer
from linrec.train.run import Run

__all__ = ["language_task", "tokenizer_of"]


def language_task(run: Run) -> LanguageModeling:
    """Return the task of a run that trained a language model.

    Args:
        run: the run.

    Raises:
        ConfigError: it trained something else.
    """
    task = run.config.task
    if not isinstance(task, LanguageModeling):
        raise ConfigError(
            f"{run.path} is no language model: it was trained on {type(task).__name__}, which has no text."
        )
    return task


def tokenizer_of(run: Run) -> Tokenizer:
    """Return the tokenizer that is kept in a run folder.

    Args:
        run: the run.

    Raises:
        ConfigError: it is not the one that the run was trained with.
        DataError: there is none.
    """
    tokenizer, vocab_size = read_tokenizer(run.path), run.config.model.vocab_size
    if vocab_size is None:
        raise ConfigError(f"{run.path} is no language model: its model takes no tokens.")
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"the tokenizer in {run.path} has {tokenizer.vocab_size:,} tokens, its model {vocab_size:,}. "
            "They do not belong together: put the tokenizer back that the run was trained with."
        )
    trained_with = run.about.get("tokenizer", tokenizer.fingerprint)
    if tokenizer.fingerprint != trained_with:
        raise ConfigError(
            f"the tokenizer in {run.path} has the fingerprint {tokenizer.fingerprint}, that of training had "
            f"{trained_with}: its tokens mean something else. "
            "Put the tokenizer back that it was trained with."
        )
    return tokenizer
