"""Shards: the tokens of a text in files that are mapped into memory, and an index that says what they are."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from linrec.errors import DataError
from linrec.files import read_json
from linrec.text.load import read_tokenizer
from linrec.text.pieces import Counter, TextCounts, batches, pieces
from linrec.text.tokenizer import Tokenizer

__all__ = ["Shards"]

INDEX = "index.json"
VERSION = 2
START = np.dtype("<i8")


class Shards:
    """The tokens of a text's splits, as `write_shards` left them in a folder.

    Args:
        folder: the folder.

    Raises:
        DataError: the folder has no index, one of another version, or files of other sizes than it says.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            index = read_json(folder / INDEX)
            self._dtype = np.dtype(index["dtype"])
            self._files: dict[str, int] = index["files"]
            self._counts = {split: TextCounts(**counts) for split, counts in index["splits"].items()}
            sizes = {name: (folder / name).stat().st_size for name in self._files}
            whole = index["version"] == VERSION and sizes == self._files
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"the tokens in {folder} cannot be read: {error}. Delete the folder to have it made again."
            ) from error
        if not whole:
            raise DataError(
                f"the tokens in {folder} are damaged, or of another version of linrec. "
                "Delete the folder to have it made again."
            )

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens."""
        return read_tokenizer(self.folder)

    def counts(self, split: str) -> TextCounts:
        """Return how much text a split has: none where there is no such split."""
        return self._counts.get(split, TextCounts())

    def tokens(self, split: str) -> NDArray[np.unsignedinteger]:
        """Return the tokens of a split, uint16 or uint32, mapped from the file; writes do not reach it."""
        return self._mapped(f"{split}.ids", self._dtype)

    def starts(self, split: str) -> NDArray[np.int64]:
        """Return where documents begin in the tokens, ascending; nothing where documents do not count."""
        return self._mapped(f"{split}.starts", START)

    def _mapped(self, name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
        # an empty file cannot be mapped
        if not self._files.get(name):
            return np.empty(0, dtype)
        return np.memmap(self.folder / name, dtype, mode="c")


@contextmanager
def write_shards(folder: Path, tokenizer: Tokenizer) -> Iterator["ShardWriter"]:
    """Make a folder of shards of what is written in the context, whole or not at all.

    The files are written into a folder of another name, forced to disk, and the folder is renamed. Where
    another process has made the same folder meanwhile, that one stays.

    Args:
        folder: the folder to make.
        tokenizer: encodes the texts.

    Raises:
        DataError: the disk is full, or nothing can be written there.
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
    """Encodes the splits of a text into files.

    Args:
        folder: an empty folder.
        tokenizer: encodes the texts.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self._folder, self._tokenizer = folder, tokenizer
        self._dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
        self._counts: dict[str, TextCounts] = {}

    def write(self, split: str, documents: Iterable[Iterable[str]], *, mark: bool) -> TextCounts:
        """Write a split.

        Args:
            split: its name.
            documents: its documents, each as blocks of text.
            mark: whether to end documents with the token for that, where there is one, and to store where
                they begin.

        Returns:
            How much was written.
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
        """Write the tokenizer and, last of all, the index."""
        self._tokenizer.save(self._folder)
        index = {
            "version": VERSION,
            "dtype": self._dtype.str,
            "files": {path.name: path.stat().st_size for path in sorted(self._folder.iterdir())},
            "splits": {split: asdict(counts) for split, counts in self._counts.items()},
            "tokenizer": {"name": self._tokenizer.name, "fingerprint": self._tokenizer.fingerprint},
        }
        with self._file(INDEX) as file:
            file.write(json.dumps(index, indent=1).encode())

    @contextmanager
    def _file(self, name: str) -> Iterator[BinaryIO]:
        with (self._folder / name).open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
