"""Shards: the tokens of a text in memory-mapped files, with an index file that describes them."""

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
    """The tokens of a text's splits, read from a folder that `write_shards` wrote.

    Args:
        folder: the folder.

    Raises:
        DataError: the index is missing or has another version, or the size of a file differs from the index.
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
                f"the tokens in {folder} cannot be read: {error}. Delete the folder; it will be made again."
            ) from error
        if not whole:
            raise DataError(
                f"the tokens in {folder} are damaged, or of another version of linrec. "
                "Delete the folder; it will be made again."
            )

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens."""
        return read_tokenizer(self.folder)

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
        if not self._files.get(name):
            return np.empty(0, dtype)
        return np.memmap(self.folder / name, dtype, mode="c")


@contextmanager
def write_shards(folder: Path, tokenizer: Tokenizer) -> Iterator["ShardWriter"]:
    """Create a folder of shards atomically from the splits that are written within the context.

    The files are written to a temporary folder and flushed to disk, then the folder is renamed. If another
    process has created the same folder in the meantime, its folder is kept.

    Args:
        folder: the folder to create.
        tokenizer: encodes the texts.

    Raises:
        DataError: the disk is full, or the folder cannot be written.
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
    """Writes the tokens of a text's splits to files.

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
            split: name of the split.
            documents: documents of the split, each as blocks of text.
            mark: whether to mark documents: end each document with the end-of-document token, if the
                tokenizer has it, and store the indices where documents begin.

        Returns:
            The amount of text that was written.
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
