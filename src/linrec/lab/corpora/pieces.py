"""Cut documents into pieces for a tokenizer, so that memory stays small, and count their text."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

__all__ = ["TextCounts"]

# maximum number of characters in a piece
PIECE = 2**16
# number of characters before this maximum in which a place to cut is searched
LOOK_BACK = 2**12
# size of a batch for the tokenizer, which spreads a batch over the processor's cores
BATCH_CHARACTERS, BATCH_PIECES = 2**22, 2**13


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


_SPACE = np.array([chr(code).isspace() for code in range(128)])


class Piece(NamedTuple):
    """A piece of a document.

    Args:
        text: text of the piece, at least one character.
        begins: whether the piece is the first of its document.
        ends: whether the piece is the last of its document.
    """

    text: str
    begins: bool
    ends: bool


class Counter:
    """Counts the text of pieces, one piece after another.

    Example:
        >>> counter = Counter()
        >>> for piece in (Piece("to be, o", True, False), Piece("r not\\nto be", False, True)):
        ...     counter.add(piece)
        >>> counter.counts(tokens=19)
        TextCounts(tokens=19, documents=1, characters=19, bytes=19, words=6, lines=2)
    """

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

    Args:
        documents: documents, each as blocks of text.
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
