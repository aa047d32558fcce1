"""Tokenise a text once: later calls find its shards by a hash of the text, the tokenizer and the options."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from linrec.errors import DataError
from linrec.extras import import_extra
from linrec.lab.corpora.shards import TOKENS, Shards, pieces, write_shards
from linrec.lab.corpora.texts import Advance, Texts, documents_of, parts_of
from linrec.text.load import load_tokenizer
from linrec.text.tokenizer import CharacterTokenizer, Tokenizer, WordTokenizer

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["default_cache", "tokenised"]

# tokenizers that are made from the training text
MADE = {made.name: made for made in (CharacterTokenizer, WordTokenizer)}


class ReadingDisplay:
    """Shows the progress of reading a text: bars on a terminal, plain lines elsewhere.

    Args:
        console: console to write to; None is standard error, which keeps progress out of standard output.
    """

    def __init__(self, console: "Console | None" = None) -> None:
        rich = import_extra("rich.console", "showing how much has been read")
        self._console: Console = rich.Console(stderr=True) if console is None else console

    def say(self, what: str) -> None:
        """Print a line."""
        self._console.print(what, soft_wrap=True, highlight=False)

    @contextmanager
    def reading(self, what: str, size: int) -> Iterator[Advance]:
        """Show a labelled progress bar within the context; yield the function that advances it."""
        if not self._console.is_terminal:
            self.say(what)
            yield lambda read: None
            return
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        label, bar = TextColumn("{task.description}"), BarColumn(None)
        columns = (label, bar, TaskProgressColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self._console, expand=True) as progress:
            task = progress.add_task(what, total=size)
            yield lambda read: progress.advance(task, read)
            # reading a part of a text ends before its whole size is read
            progress.update(task, completed=size)


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
        tokenizer: name or path for `load_tokenizer`; or "characters" or "words", those of the training text.
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
    made = MADE.get(tokenizer)
    loaded = load_tokenizer(tokenizer) if made is None else made
    depends_on = {
        "version": TOKENS,
        "texts": texts.identity(),
        "tokenizer": loaded.fingerprint if isinstance(loaded, Tokenizer) else tokenizer,
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
    tokenizer: Tokenizer | type[CharacterTokenizer] | type[WordTokenizer],
    documents: bool,
    shares: dict[str, float],
    display: ReadingDisplay,
) -> None:
    size = texts.size("train")
    with display.reading("measuring the text", size) as advance:
        parts = parts_of(texts, documents=documents, shares=shares, advance=advance)
    if not isinstance(tokenizer, Tokenizer):
        with display.reading(f"collecting {tokenizer.name}", size) as advance:
            of_training = documents_of(texts, parts["train"], documents=documents, advance=advance)
            # blocks may end within a word, pieces do not
            tokenizer = tokenizer.of(piece.text for piece in pieces(of_training))
    with write_shards(folder, tokenizer) as writer:
        for split, part in parts.items():
            with display.reading(f"tokenising {split}", texts.size(part.split)) as advance:
                found = documents_of(texts, part, documents=documents, advance=advance)
                counts = writer.write(split, found, mark=documents)
            if split == "train" and not counts.characters:
                raise DataError("the training text is empty. Pass text that has characters.")
    display.say(f"tokens are in {folder}")
