"""What files and data sets have in common: text in splits, as one stream or as documents; and cutting it."""

from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from itertools import islice
from typing import Any, NamedTuple, Protocol, runtime_checkable

from linrec.errors import DataError

# called with how much was read since the last call
Advance = Callable[[int], None]


@runtime_checkable
class Texts(Protocol):
    """Where text comes from."""

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that the source has itself; "train" is one."""
        ...

    def size(self, split: str) -> int:
        """How much there is to read, in units of the source: bytes, rows."""
        ...

    def documents(self, split: str, advance: Advance) -> Iterator[Iterable[str]]:
        """Yield the documents of a split, each as blocks of text; some may be empty."""
        ...

    def stream(self, split: str, advance: Advance) -> Iterator[str]:
        """Yield all text of a split as blocks."""
        ...

    def identity(self) -> Any:
        """What tells this text from another one, as JSON holds it."""
        ...


class Part(NamedTuple):
    """A part of what a source has as a split: units [start, stop), characters of its stream or documents.

    Args:
        split: which split of the source.
        start: first unit.
        stop: unit after the last; None is the end.
    """

    split: str
    start: int = 0
    stop: int | None = None


def parts_of(texts: Texts, *, documents: bool, shares: dict[str, float], advance: Advance) -> dict[str, Part]:
    """Return where the text of each split is: in a split of the source, or in a part of its training text.

        train | validation | test     at floor(n (1 - v - t)) and floor(n (1 - t)) of n units

    Args:
        texts: the source.
        documents: whether whole documents are counted, those without text left out, or characters.
        shares: of the splits to cut where the source has none of that name, in the order of their places.
        advance: called while units are counted.

    Raises:
        DataError: a split would be empty.
    """
    parts = {split: Part(split) for split in texts.splits}
    # decimals as they were written: a tenth is a tenth
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
                "with splits" + (", or take it as one stream instead of documents." if documents else ".")
            )
        parts[name] = Part("train", start, stop)
        start = stop
    return parts


def documents_of(texts: Texts, part: Part, *, documents: bool, advance: Advance) -> Iterator[Iterable[str]]:
    """Yield the documents of a part, each as blocks of text; all text is one where documents do not count."""
    if documents:
        nonempty = filter(None, map(_peeked, texts.documents(part.split, advance)))
        yield from islice(nonempty, part.start, part.stop)
    else:
        yield _between(texts.stream(part.split, advance), part.start, part.stop)


def _peeked(document: Iterable[str]) -> Iterator[str] | None:
    """Return a document that has text, and None for another."""
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
