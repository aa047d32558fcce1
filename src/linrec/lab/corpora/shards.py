"""Shards: the tokens of a text in memory-mapped files, with an index file that describes them.

The index has its own checksum and the checksum of every file. Opening shards verifies all files, a gigabyte a
second. Files over 256 MiB are verified once: their size, inode and times are then noted in `verified.json`,
and they are verified again only if one of these has changed.
"""

import contextlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from linrec.errors import DataError
from linrec.files import WRONG, checksum, mapped, read_json, write_json
from linrec.text.load import read_tokenizer
from linrec.text.tokenizer import Tokenizer

__all__ = ["Shards", "TextCounts"]

INDEX = "index.json"
# version of the index, and the earlier version that has no checksums
VERSION, WITHOUT_CHECKSUMS = 3, 2
# version of the tokens, on which the name of the folder depends
TOKENS = 2
DTYPES = ("<u2", "<u4")
START = np.dtype("<i8")

VERIFIED = "verified.json"
# files up to this size, in bytes, are verified whenever they are opened
SMALL = 2**28

# maximum number of characters in a piece
PIECE = 2**16
# number of characters before this maximum in which a place to cut is searched
LOOK_BACK = 2**12
# size of a batch for the tokenizer, which spreads a batch over the processor's cores
BATCH_CHARACTERS, BATCH_PIECES = 2**22, 2**13
_SPACE = np.array([chr(code).isspace() for code in range(128)])


@dataclass(frozen=True)
class TextCounts:
    """The amount of text in a split, in several units.

    Word-level perplexities of the literature count the end of every line as a word: divide by
    `words + lines`.

    Args:
        tokens: number of tokens, end-of-document tokens included.
        documents: number of documents; 1 if the text is a single stream.
        characters: number of code points.
        bytes: number of bytes in UTF-8.
        words: number of words, as separated by `str.split`.
        lines: number of lines; an unfinished line at the end of a document counts.
    """

    tokens: int = 0
    documents: int = 0
    characters: int = 0
    bytes: int = 0
    words: int = 0
    lines: int = 0


class Shards:
    """The tokens of a text's splits, read from a folder that `write_shards` wrote.

    Args:
        folder: the folder.

    Raises:
        DataError: a file is missing or damaged, or the index has another version.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            index = read_json(folder / INDEX)
            if index["version"] not in (VERSION, WITHOUT_CHECKSUMS):
                raise ValueError(f"{INDEX} is of another version of linrec")
            if index["dtype"] not in DTYPES:
                raise ValueError(f"`dtype` must be one of {', '.join(DTYPES)}; got {index['dtype']!r}")
            self._dtype = np.dtype(index["dtype"])
            self._counts = {split: TextCounts(**counts) for split, counts in index["splits"].items()}
            sealed = index["version"] == VERSION
            self._files = {
                name: dict(about) if sealed else {"bytes": about} for name, about in index["files"].items()
            }
            self._verify()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"{INDEX} lacks {error}" if isinstance(error, KeyError) else error
            raise DataError(
                f"the tokens in {folder} cannot be read: {why}. Delete the folder; it will be made again."
            ) from error
        if not sealed:
            warnings.warn(
                f"the tokens in {folder} have no checksum, because an earlier version of linrec wrote them; "
                "delete the folder to make them again.",
                stacklevel=2,
            )

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens."""
        return read_tokenizer(self.folder)

    def _verify(self) -> None:
        """Raise ValueError if a file is damaged; large files that were verified before are not read again."""
        before: dict[str, list[int]] = {}
        with contextlib.suppress(OSError, ValueError):
            before = read_json(self.folder / VERIFIED)
        known, unread = {}, set()
        for name, about in self._files.items():
            found = (self.folder / name).stat()
            if found.st_size != about["bytes"]:
                raise ValueError(f"{name} has {found.st_size} bytes, not {about['bytes']}")
            state = [found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns]
            if found.st_size > SMALL:
                known[name] = state
                if before.get(name) == state:
                    unread.add(name)
                    continue
            with mapped(self.folder / name) as content:
                if checksum(content) != about.get("checksum", checksum(content)):
                    raise ValueError(f"{name}: {WRONG}")
        for split, counts in self._counts.items():
            if f"{split}.ids" not in unread:
                self._check(split, counts)
        if known != before:
            # another user's cache may be read-only, and is verified each time
            with contextlib.suppress(OSError):
                write_json(self.folder / VERIFIED, known)

    def _check(self, split: str, counts: TextCounts) -> None:
        """Raise ValueError if tokens, starts and counts of a split do not fit together."""
        ids, starts, limit = self.tokens(split), self.starts(split), self.tokenizer.vocab_size
        if any(type(count) is not int or count < 0 for count in asdict(counts).values()):
            raise ValueError(f"{INDEX} must count in integers of at least 0; got {counts}")
        if len(ids) != counts.tokens:
            raise ValueError(f"{split}.ids has {len(ids)} tokens, but {INDEX} counts {counts.tokens}")
        if len(ids) and ids.max() >= limit:
            raise ValueError(f"{split}.ids has the token {ids.max()}, but its tokenizer has {limit} tokens")
        if len(starts) and (starts[0] < 0 or starts[-1] > len(ids) or (np.diff(starts) < 0).any()):
            raise ValueError(f"{split}.starts must be ascending indices of {len(ids)} tokens")

    def counts(self, split: str) -> TextCounts:
        """Return the amount of text in a split: all zeros if the split does not exist."""
        return self._counts.get(split, TextCounts())

    def tokens(self, split: str) -> NDArray[np.unsignedinteger]:
        """Return the tokens of a split, uint16 or uint32, as a copy-on-write memory map of the file."""
        return self._mapped(f"{split}.ids", self._dtype)

    def starts(self, split: str) -> NDArray[np.int64]:
        """Return the indices of the tokens that begin documents, ascending; empty for a single stream."""
        return self._mapped(f"{split}.starts", START)

    def _mapped(self, name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
        # an empty file cannot be mapped
        if not self._files.get(name, {}).get("bytes"):
            return np.empty(0, dtype)
        return np.memmap(self.folder / name, dtype, mode="c")


@contextmanager
def write_shards(folder: Path, tokenizer: Tokenizer) -> Iterator["ShardWriter"]:
    """Create a folder of shards atomically from the splits that are written within the context.

    The files are written to a temporary folder and flushed to disk, then the folder is renamed. If another
    process has created the same folder in the meantime, its folder is kept.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".partial", dir=folder.parent))
        try:
            writer = ShardWriter(partial, tokenizer)
            yield writer
            writer.finish()
            try:
                os.replace(partial, folder)
            except OSError:
                if not (folder / INDEX).is_file():
                    raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"tokens cannot be written to {folder.parent}: {error.strerror}. "
            "Make room, or pass another `cache`."
        ) from error


class ShardWriter:
    """Writes the tokens of a text's splits to files in an empty folder."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self._folder, self._tokenizer = folder, tokenizer
        self._dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
        self._counts: dict[str, TextCounts] = {}

    def write(self, split: str, documents: Iterable[Iterable[str]], *, mark: bool) -> TextCounts:
        """Write the documents of a split, each as blocks of text; return the amount that was written.

        Marked documents end with the end-of-document token, if the tokenizer has it, and the indices where
        they begin are stored.
        """
        end = self._tokenizer.end_of_document if mark else None
        ending = np.array([] if end is None else [end], self._dtype).tobytes()
        counter, n_bytes, starts = Counter(), 0, []
        with self._file(f"{split}.ids") as file:
            for batch in batches(pieces(documents)):
                encoded = self._tokenizer.encode_batch([piece.text for piece in batch])
                for piece, ids in zip(batch, encoded, strict=True):
                    counter.add(piece)
                    if piece.begins:
                        starts.append(n_bytes // self._dtype.itemsize)
                    n_bytes += file.write(ids.astype(self._dtype).tobytes())
                    if piece.ends:
                        n_bytes += file.write(ending)
        if mark:
            with self._file(f"{split}.starts") as file:
                file.write(np.array(starts, START).tobytes())
        self._counts[split] = counter.counts(tokens=n_bytes // self._dtype.itemsize)
        return self._counts[split]

    def finish(self) -> None:
        """Write the tokenizer and then, as the last file, the index."""
        self._tokenizer.save(self._folder)
        index = {
            "version": VERSION,
            "dtype": self._dtype.str,
            "files": {path.name: _described(path) for path in sorted(self._folder.iterdir())},
            "splits": {split: asdict(counts) for split, counts in self._counts.items()},
            "tokenizer": {"name": self._tokenizer.name, "fingerprint": self._tokenizer.fingerprint},
        }
        write_json(self._folder / INDEX, index)

    @contextmanager
    def _file(self, name: str) -> Iterator[BinaryIO]:
        with (self._folder / name).open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())


def _described(path: Path) -> dict[str, Any]:
    with mapped(path) as content:
        return {"bytes": len(content), "checksum": checksum(content)}


class Piece(NamedTuple):
    """A piece of a document, at least one character, and whether it is the document's first and its last."""

    text: str
    begins: bool
    ends: bool


class Counter:
    """Counts the text of pieces, one piece after another."""

    def __init__(self) -> None:
        self._documents = self._characters = self._bytes = self._words = self._lines = 0
        self._last = " "

    def add(self, piece: Piece) -> None:
        """Count a piece, which continues the piece before unless it begins a document."""
        text = piece.text
        self._documents += piece.begins
        self._characters += len(text)
        self._bytes += len(text) if text.isascii() else len(text.encode())
        cut_word = not (piece.begins or self._last.isspace() or text[0].isspace())
        self._words += _words(text) - cut_word
        self._lines += text.count("\n") + (piece.ends and not text.endswith("\n"))
        self._last = text[-1]

    def counts(self, *, tokens: int) -> TextCounts:
        """Return the counts, with a number of tokens that the caller has counted."""
        return TextCounts(tokens, self._documents, self._characters, self._bytes, self._words, self._lines)


def pieces(documents: Iterable[Iterable[str]]) -> Iterator[Piece]:
    """Yield documents in pieces of at most 2^16 characters.

    A long document is cut before a single space between two words. Nearly all tokenizers cut there, too, so
    the pieces have the same tokens as the whole document. If the last 2^12 characters of a piece contain no
    such space, the piece is cut at 2^16 characters.
    """
    for document in documents:
        begins, held = True, ""
        for text in _cut(document):
            if held:
                yield Piece(held, begins, False)
                begins = False
            held = text
        if held:
            yield Piece(held, begins, True)


def batches(found: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Yield pieces in lists of a few million characters."""
    batch: list[Piece] = []
    characters = 0
    for piece in found:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= BATCH_CHARACTERS or len(batch) == BATCH_PIECES:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _words(text: str) -> int:
    """Return len(text.split()); for ASCII text without creating the words."""
    if not text.isascii():
        return len(text.split())
    space = _SPACE[np.frombuffer(text.encode(), dtype=np.uint8)]
    return int(np.count_nonzero(space[:-1] & ~space[1:])) + int(not space[0])


def _cut(blocks: Iterable[str]) -> Iterator[str]:
    left = ""
    for block in blocks:
        text, start = left + block, 0
        while len(text) - start > PIECE:
            stop = _place(text, start + PIECE)
            yield text[start:stop]
            start = stop
        left = text[start:]
    if left:
        yield left


def _place(text: str, limit: int) -> int:
    """Return the position of the cut, at or before `limit`, which is inside the text."""
    place = limit + 1
    while (place := text.rfind(" ", limit - LOOK_BACK, place)) > 0:
        if not text[place - 1].isspace() and not text[place + 1 : place + 2].isspace():
            return place
    return limit
