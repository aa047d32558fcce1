"""Text in pieces that a tokenizer takes at once, so that memory stays small, and how much text there was."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

__all__ = ["TextCounts"]

# characters that are encoded as one
PIECE = 2**16
# how far back from its end a piece may be cut
LOOK_BACK = 2**12
# what goes to the tokenizer together, to be spread over the processor's cores
BATCH_CHARACTERS, BATCH_PIECES = 2**22, 2**13


@dataclass(frozen=True)
class TextCounts:
    """How much text there is in a split.

    Word-level figures of language models count a token for the end of every line beside the words: they
    divide by `words + lines`.

    Args:
        tokens: tokens, those that end documents included.
        documents: documents; 1 where all text is one stream.
        characters: code points.
        bytes: bytes in UTF-8.
        words: runs of characters without white space, as `str.split` finds them.
        lines: newlines, and one more for a document that does not end with one.
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
        text: at least one character.
        begins: whether the document begins with it.
        ends: whether the document ends with it.
    """

    text: str
    begins: bool
    ends: bool


class Counter:
    """Adds up pieces as they go by.

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
        """Count a piece; it follows the one before where it does not begin a document."""
        text = piece.text
        self._documents += piece.begins
        self._characters += len(text)
        self._bytes += len(text) if text.isascii() else len(text.encode())
        cut_word = not (piece.begins or self._last.isspace() or text[0].isspace())
        self._words += _words(text) - cut_word
        self._lines += text.count("\n") + (piece.ends and not text.endswith("\n"))
        self._last = text[-1]

    def counts(self, *, tokens: int) -> TextCounts:
        """Return what was counted; the number of tokens is told."""
        return TextCounts(tokens, self._documents, self._characters, self._bytes, self._words, self._lines)


def pieces(documents: Iterable[Iterable[str]]) -> Iterator[Piece]:
    """Yield documents in pieces of at most 2^16 characters.

    A long document is cut before a single space between two words, where nearly all tokenizers cut too: the
    tokens of the pieces are those of the whole. Text without such a place in reach is cut anywhere.

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
    """Return len(text.split()), of ASCII without making the words."""
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
    """Return where to cut at or before `limit`, which lies inside the text."""
    place = limit + 1
    while (place := text.rfind(" ", limit - LOOK_BACK, place)) > 0:
        if not text[place - 1].isspace() and not text[place + 1 : place + 2].isspace():
            return place
    return limit
