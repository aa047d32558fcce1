"""The interface of text sources, and the division of their training text into splits."""

from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from itertools import islice
from typing import Any, NamedTuple, Protocol, runtime_checkable

from linrec.errors import DataError

# called with the amount that was read since the last call
Advance = Callable[[int], None]


@runtime_checkable
class Texts(Protocol):
    """A source of text: local files or a data set."""

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits that the source itself has; always includes "train"."""
        ...

    def size(self, split: str) -> int:
        """Return the amount to read for a split, in the source's unit: bytes or rows."""
        ...

    def documents(self, split: str, advance: Advance) -> Iterator[Iterable[str]]:
        """Yield the documents of a split, each as blocks of text; some may be empty."""
        ...

    def stream(self, split: str, advance: Advance) -> Iterator[str]:
        """Yield the text of a split as blocks."""
        ...

    def identity(self) -> Any:
        """Return a JSON value that identifies the text."""
        ...


class WithoutSpaces:
    """A text without the spaces of another text; implements `Texts`.

    Some files separate characters by spaces, and write a space as another character, such as `_`.

    Args:
        texts: the other text.
    """

    def __init__(self, texts: Texts) -> None:
        self._texts = texts

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits of the other text."""
        return self._texts.splits

    def size(self, split: str) -> int:
        """Return the amount to read for a split, in the unit of the other text."""
        return self._texts.size(split)

    def documents(self, split: str, advance: Advance) -> Iterator[Iterable[str]]:
        """Yield the documents of a split, each as blocks of text."""
        for document in self._texts.documents(split, advance):
            yield map(_unspaced, document)

    def stream(self, split: str, advance: Advance) -> Iterator[str]:
        """Yield the text of a split as blocks."""
        return map(_unspaced, self._texts.stream(split, advance))

    def identity(self) -> Any:
        """Return a JSON value that identifies the text."""
        return {"without spaces": self._texts.identity()}


class Part(NamedTuple):
    """A range of units of a source's split; a unit is a document, or a character of the stream.

    Args:
        split: split of the source.
        start: first unit.
        stop: unit after the last; None is the end.
    """

    split: str
    start: int = 0
    stop: int | None = None


def parts_of(texts: Texts, *, documents: bool, shares: dict[str, float], advance: Advance) -> dict[str, Part]:
    """Return the part of the source for each split: a whole split, or a range of the training text.

        train | validation | test     cut at units floor(n (1 - v - t)) and floor(n (1 - t)) of n

    Args:
        texts: the source.
        documents: whether units are documents, ignoring empty documents; if not, units are characters.
        shares: v and t, the shares of the training text for splits that the source does not have, in the
            order of the splits in the text.
        advance: called while units are counted.

    Raises:
        DataError: a split would be empty.
    """
    parts = {split: Part(split) for split in texts.splits}
    # exact decimals: the float 0.1 is not exactly a tenth
    cut = {name: Fraction(str(share)) for name, share in shares.items() if share and name not in parts}
    if not cut:
        return parts
    if documents:
        total = sum(any(document) for document in texts.documents("train", advance))
    else:
        total = sum(len(block) for block in texts.stream("train", advance))
    share, start = 1 - sum(cut.values(), Fraction()), 0
    for name, following in {"train": Fraction(), **cut}.items():
        share += following
        stop = int(total * share)
        if start == stop:
            raise DataError(
                f"the text has {total} {'documents' if documents else 'characters'}, too few to cut it into "
                f"{', '.join(['train', *cut])}: {name} would be empty. Pass other shares, or text that comes "
                "with splits" + (", or read it as one stream instead of documents." if documents else ".")
            )
        parts[name] = Part("train", start, stop)
        start = stop
    return parts


def documents_of(texts: Texts, part: Part, *, documents: bool, advance: Advance) -> Iterator[Iterable[str]]:
    """Yield the documents of a part, each as blocks of text; a part of a stream is a single document."""
    if documents:
        nonempty = filter(None, map(_peeked, texts.documents(part.split, advance)))
        yield from islice(nonempty, part.start, part.stop)
    else:
        yield _between(texts.stream(part.split, advance), part.start, part.stop)


def _peeked(document: Iterable[str]) -> Iterator[str] | None:
    """Return an iterator equal to the document, or None if the document has no text."""
    blocks = filter(None, document)
    first = next(blocks, None)
    return None if first is None else _chained(first, blocks)


def _chained(first: str, others: Iterator[str]) -> Iterator[str]:
    yield first
    yield from others


def _between(blocks: Iterable[str], start: int, stop: int | None) -> Iterator[str]:
    """Yield the characters [start, stop) of a stream."""
    place = 0
    for block in blocks:
        if stop is not None and place >= stop:
            return
        end = None if stop is None else stop - place
        if piece := block[max(0, start - place) : end]:
            yield piece
        place += len(block)


def _unspaced(block: str) -> str:
    return block.replace(" ", "")
