"""Sources of text: their interface, local files, and the division of training text into splits."""

import codecs
import glob
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from linrec.errors import DataError
from linrec.files import inside, reason

# called with the amount that was read since the last call
Advance = Callable[[int], None]
# suffixes of the files that are read from a folder; a glob may match any name
SUFFIXES = (".txt", ".text", ".md", ".tokens", ".raw")
# "train.txt", "wiki.valid.tokens", "test/one.txt"
SPLIT_PART = re.compile(r"(?:^|[._-])(train|valid|test)", re.IGNORECASE)
SPLIT_NAMES = {"train": "train", "valid": "validation", "test": "test"}
BLOCK = 2**20
# files up to this size are identified by their content, larger files by path, size and modification time
HASHED = 2**24


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


class TextFiles:
    """The text of local files, in the order of their paths; implements `Texts`.

    A folder is searched recursively for files that end in .txt, .text, .md, .tokens or .raw. A glob takes all
    files that it matches. If a part of a file's name, or of its folder's name, begins with "train", "valid"
    or "test", the file belongs to this split. All other files are then left out. If no name has such a part,
    all files are training text.

    Args:
        path: a file, a folder, or a glob such as "books/**/*.txt".

    Raises:
        DataError: the path matches no file, all files are empty, or no file belongs to the training split.
    """

    def __init__(self, path: Path) -> None:
        self.files = _by_split(path)

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits that have files; always includes "train"."""
        return tuple(self.files)

    def size(self, split: str) -> int:
        """Return the size of a split's files in bytes: the sum of all `advance` calls while reading them."""
        return sum(path.stat().st_size for path in self.files[split])

    def documents(self, split: str, advance: Advance) -> Iterator[Iterator[str]]:
        """Yield the text of each file as an iterator of blocks, which are read on demand."""
        for path in self.files[split]:
            yield _blocks(path, advance)

    def stream(self, split: str, advance: Advance) -> Iterator[str]:
        """Yield the text of a split as blocks; add a newline between files if the first file lacks it."""
        last = "\n"
        for document in self.documents(split, advance):
            for place, block in enumerate(document):
                yield block if place > 0 or last.endswith("\n") else "\n" + block
                last = block

    def identity(self) -> Any:
        """Return a JSON value that identifies the text."""
        return {split: [file_identity(path) for path in paths] for split, paths in self.files.items()}


class CutFile:
    """A single file whose last bytes are for validation and testing, as in enwik8; implements `Texts`.

        train | validation | test     cut 2 n and n bytes before the end

    A cut within a character moves to its end, so that every split is UTF-8.

    Args:
        path: the file.
        held_out: n.

    Raises:
        DataError: the path is not a file, or it has no more than 2 n bytes.
    """

    splits = ("train", "validation", "test")

    def __init__(self, path: Path, held_out: int) -> None:
        self._path = path.expanduser()
        if not self._path.is_file():
            raise DataError(f"`held_out_bytes` needs `path` to be a single file; got {path}.")
        size = self._path.stat().st_size
        if size <= 2 * held_out:
            raise DataError(
                f"`path` = {path} must have more than 2 `held_out_bytes` = {2 * held_out} bytes; it has "
                f"{size}. Pass a smaller number, or the whole file."
            )
        cuts = [0, *(_boundary(self._path, size - n * held_out) for n in (2, 1)), size]
        self._ranges = dict(zip(self.splits, pairwise(cuts), strict=True))

    def size(self, split: str) -> int:
        """Return the number of bytes of a split."""
        start, stop = self._ranges[split]
        return stop - start

    def documents(self, split: str, advance: Advance) -> Iterator[Iterable[str]]:
        """Yield the text of a split as a single document."""
        yield self.stream(split, advance)

    def stream(self, split: str, advance: Advance) -> Iterator[str]:
        """Yield the text of a split as blocks."""
        return _blocks(self._path, advance, *self._ranges[split])

    def identity(self) -> Any:
        """Return a JSON value that identifies the text."""
        return {"cut": list(self._ranges.values()), "file": file_identity(self._path)}


class WithoutSpaces:
    """The text of another source without its spaces; implements `Texts`.

    Some files separate characters by spaces, and write a space as another character, such as `_`.
    """

    def __init__(self, texts: Texts) -> None:
        self._texts, self.splits, self.size = texts, texts.splits, texts.size

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
    """The units [start, stop) of a source's split; a unit is a document, or a character of the stream."""

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
    return None if first is None else chain([first], blocks)


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


def _by_split(path: Path) -> dict[str, list[Path]]:
    path = path.expanduser()
    if path.is_file():
        # the file that the user names may be a link
        found, base = [path], Path(os.path.realpath(path)).parent
    elif path.is_dir():
        found, base = [file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES], path
        if not any(file.is_file() for file in found):
            raise DataError(
                f"`path` = {path} has no text: no file in it ends in {', '.join(SUFFIXES)}. "
                f'Name other files by a glob, such as "{path / "*.py"}".'
            )
    elif glob.has_magic(str(path)):
        found = [Path(file) for file in glob.glob(str(path), recursive=True)]
        plain = [part for part in path.parents if not glob.has_magic(str(part))]
        base = plain[0]
        if not any(file.is_file() for file in found):
            raise DataError(f"`path` = {path} matches no file.")
    else:
        raise DataError(f"`path` = {path} does not exist.")
    # empty files would be empty documents, and add nothing to a stream
    try:
        files = sorted(inside(file, base) for file in found if file.is_file() and file.stat().st_size)
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {reason(error)}.") from error
    if not files:
        raise DataError(f"`path` = {path} has no text: its files are empty.")
    return _assigned(path, files, base) if len(files) > 1 else {"train": files}


def _assigned(path: Path, files: list[Path], base: Path) -> dict[str, list[Path]]:
    by_split: dict[str, list[Path]] = {}
    for file in files:
        # the first path component below the folder: a file, or a folder such as "train"
        if match := SPLIT_PART.search(file.relative_to(base).parts[0]):
            by_split.setdefault(SPLIT_NAMES[match[1].lower()], []).append(file)
    if not by_split:
        return {"train": files}
    if "train" not in by_split:
        found = ", ".join(sorted(file.name for files in by_split.values() for file in files))
        raise DataError(f"`path` = {path} has no text to train on, only {found}. Name a file train.txt.")
    return by_split


def _boundary(path: Path, place: int) -> int:
    """Return the index of the first byte at or after `place` that begins a character of UTF-8."""
    with path.open("rb") as file:
        file.seek(place)
        return place + next((n for n, byte in enumerate(file.read(4)) if byte & 0xC0 != 0x80), 0)


def _blocks(path: Path, advance: Advance, start: int = 0, stop: int | None = None) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    read = start
    try:
        with path.open("rb") as file:
            file.seek(start)
            while True:
                block = file.read(BLOCK if stop is None else min(BLOCK, stop - read))
                held = len(decoder.getstate()[0])
                try:
                    text = decoder.decode(block, final=not block)
                except UnicodeDecodeError as error:
                    raise DataError(
                        f"{path} is not UTF-8: {error.reason} at byte {read - held + error.start}. "
                        "Convert it, or leave it out with a glob as `path`."
                    ) from error
                read += len(block)
                advance(len(block))
                if text:
                    yield text
                if not block:
                    return
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error


def file_identity(path: Path) -> Any:
    """Return a JSON value that identifies the content of a file."""
    about = path.stat()
    if about.st_size <= HASHED:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return [str(path.resolve()), about.st_size, about.st_mtime_ns]
