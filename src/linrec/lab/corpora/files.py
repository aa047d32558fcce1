"""Text from local files: a file, a folder, or a glob."""

import codecs
import glob
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from linrec.errors import DataError
from linrec.files import inside, reason
from linrec.lab.corpora.texts import Advance

__all__ = ["TextFiles"]

# suffixes of the files that are read from a folder; a glob may match any name
SUFFIXES = (".txt", ".text", ".md", ".tokens", ".raw")
# "train.txt", "wiki.valid.tokens", "test/one.txt"
SPLIT_PART = re.compile(r"(?:^|[._-])(train|valid|test)", re.IGNORECASE)
SPLIT_NAMES = {"train": "train", "valid": "validation", "test": "test"}
BLOCK = 2**20
# files up to this size are identified by their content, larger files by path, size and modification time
HASHED = 2**24


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
        return {split: [_identity(path) for path in paths] for split, paths in self.files.items()}


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


def _blocks(path: Path, advance: Advance) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    read = 0
    try:
        with path.open("rb") as file:
            while True:
                block = file.read(BLOCK)
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


def _identity(path: Path) -> Any:
    about = path.stat()
    if about.st_size <= HASHED:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return [str(path.resolve()), about.st_size, about.st_mtime_ns]
