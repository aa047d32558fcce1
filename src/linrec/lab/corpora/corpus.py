"""Tokenise a text once: later calls find its shards by a hash of the text, the tokenizer and the options."""

import hashlib
import json
import os
from itertools import chain
from pathlib import Path

from linrec.errors import DataError
from linrec.lab.corpora.progress import ReadingDisplay
from linrec.lab.corpora.shards import TOKENS, Shards, write_shards
from linrec.lab.corpora.texts import Texts, documents_of, parts_of
from linrec.text.load import load_tokenizer
from linrec.text.tokenizer import CharacterTokenizer, Tokenizer

__all__ = ["default_cache", "tokenised"]


def default_cache() -> Path:
    """Return the default folder for shards: $XDG_CACHE_HOME/linrec, or else ~/.cache/linrec."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".cache") / "linrec"


def tokenised(
    texts: Texts,
    tokenizer: str,
    *,
    documents: bool,
    shares: dict[str, float],
    cache: Path | None = None,
    display: ReadingDisplay | None = None,
) -> Shards:
    """Return the tokens of a text, from the cache if the text was tokenised before.

    Args:
        texts: source of the text.
        tokenizer: name or path for `load_tokenizer`, or "characters" for the characters of the training text.
        documents: whether to keep documents apart; if not, the text of a split is a single stream.
        shares: share of the training text for every split that the source itself does not have.
        cache: folder for shards; None is `default_cache()`.
        display: shows progress; None shows progress on standard error.

    Returns:
        The shards. Every combination of text, tokenizer and options has its own folder in the cache.

    Raises:
        DataError: the tokenizer cannot be loaded or does not know a character; the text is empty, cannot be
            read, or is too short to be split; or the shards cannot be written or read.

    Example:
        >>> import tempfile
        >>> from linrec.lab.corpora import TextFiles
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "rose.txt").write_text("a rose is a rose is a rose")
        >>> text = TextFiles(folder / "rose.txt")
        >>> shards = tokenised(text, "bytes", documents=False, shares={"test": 0.25}, cache=folder)
        >>> shards.tokenizer.decode(shards.tokens("test")), shards.counts("train").words
        (' a rose', 6)
    """
    loaded = None if tokenizer == CharacterTokenizer.name else load_tokenizer(tokenizer)
    depends_on = {
        "version": TOKENS,
        "texts": texts.identity(),
        "tokenizer": tokenizer if loaded is None else loaded.fingerprint,
        "documents": documents,
        "shares": shares,
    }
    key = hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()[:24]
    folder = (default_cache() if cache is None else cache.expanduser()) / key
    if not folder.is_dir():
        _write(folder, texts, loaded, documents, shares, display or ReadingDisplay())
    return Shards(folder)


def _write(
    folder: Path,
    texts: Texts,
    tokenizer: Tokenizer | None,
    documents: bool,
    shares: dict[str, float],
    display: ReadingDisplay,
) -> None:
    size = texts.size("train")
    with display.reading("measuring the text", size) as advance:
        parts = parts_of(texts, documents=documents, shares=shares, advance=advance)
    if tokenizer is None:
        with display.reading("collecting characters", size) as advance:
            of_training = documents_of(texts, parts["train"], documents=documents, advance=advance)
            tokenizer = CharacterTokenizer.of(chain.from_iterable(of_training))
    with write_shards(folder, tokenizer) as writer:
        for split, part in parts.items():
            with display.reading(f"tokenising {split}", texts.size(part.split)) as advance:
                found = documents_of(texts, part, documents=documents, advance=advance)
                counts = writer.write(split, found, mark=documents)
            if split == "train" and not counts.characters:
                raise DataError("the training text is empty. Pass text that has characters.")
    display.say(f"tokens are in {folder}")
