"""Text from Hugging Face data sets: by name from the hub, or from files and folders."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from linrec.errors import DataError, unknown
from linrec.extras import import_extra, one_line
from linrec.files import inside
from linrec.lab.corpora.texts import Advance

__all__ = ["DatasetRows"]

# the builder of `datasets` for every file suffix
BUILDERS = {
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}
# index files of `Dataset.save_to_disk` and `DatasetDict.save_to_disk`
SAVED = ("state.json", "dataset_dict.json")
SPLIT_NAMES = {"valid": "validation", "val": "validation", "dev": "validation"}
ROWS = 1000


class DatasetRows:
    """The texts of a data set's rows, in their order; implements `Texts`.

    Args:
        dataset: a name on the Hugging Face hub; a folder that `save_to_disk` wrote; a file that ends in
            .json, .jsonl, .csv, .parquet, .arrow or .txt; or a folder of files with these suffixes.
        config: configuration of the data set, if it has several, such as "wikitext-103-raw-v1".
        column: the column that holds the text.

    Raises:
        DataError: the package `datasets` is missing, the data set cannot be loaded, the data set has no split
            "train", or the column does not exist or does not hold strings.
    """

    def __init__(self, dataset: str, *, config: str | None = None, column: str = "text") -> None:
        self._about = {"dataset": dataset, "config": config, "column": column}
        self._column = column
        self._rows = load_splits(dataset, config=config)
        datasets = import_extra("datasets", f"the data set {dataset!r}")
        if "train" not in self._rows:
            raise DataError(
                f"`dataset` = {dataset} has no split 'train', only {', '.join(map(repr, self._rows))}."
            )
        for rows in self._rows.values():
            if column not in rows.column_names:
                raise DataError(f"`text_column` of {dataset}: {unknown('column', column, rows.column_names)}")
            kind = rows.features[column]
            if not isinstance(kind, datasets.Value) or kind.dtype not in ("string", "large_string"):
                raise DataError(
                    f"`text_column` = {column!r} of {dataset} must hold strings; it holds {kind}."
                )

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the data set's splits among "train", "validation" and "test"; includes "train"."""
        return tuple(self._rows)

    def size(self, split: str) -> int:
        """Return the number of rows of a split."""
        return len(self._rows[split])

    def documents(self, split: str, advance: Advance) -> Iterator[tuple[str]]:
        """Yield the text of each row; a missing text is empty."""
        for texts in self._batches(split, advance):
            for text in texts:
                yield (text or "",)

    def stream(self, split: str, advance: Advance) -> Iterator[str]:
        """Yield the text of a split as blocks; every row ends with a newline, empty rows included."""
        for texts in self._batches(split, advance):
            yield "".join(text if text and text.endswith("\n") else f"{text or ''}\n" for text in texts)

    def identity(self) -> Any:
        """Return a JSON value that identifies the text."""
        files = {
            split: [len(rows), *(_file_identity(Path(file["filename"])) for file in rows.cache_files)]
            for split, rows in self._rows.items()
        }
        return {**self._about, "files": files}

    def _batches(self, split: str, advance: Advance) -> Iterator[list[str | None]]:
        for rows in self._rows[split].select_columns([self._column]).with_format(None).iter(ROWS):
            texts = rows[self._column]
            yield texts
            advance(len(texts))


def load_splits(dataset: str, *, config: str | None = None) -> dict[str, Any]:
    """Load a Hugging Face data set, and return its rows for training, validation and testing."""
    datasets = import_extra("datasets", f"the data set {dataset!r}")
    path = Path(dataset).expanduser()
    try:
        for file in path.rglob("*"):
            inside(file, path)
        if any((path / name).is_file() for name in SAVED):
            loaded = datasets.load_from_disk(str(path))
        elif path.is_file():
            if path.suffix not in BUILDERS:
                raise unknown("reader for data set files that end in", path.suffix, BUILDERS)
            loaded = datasets.load_dataset(BUILDERS[path.suffix], data_files=str(path))
        else:
            loaded = datasets.load_dataset(str(path) if path.is_dir() else dataset, config)
    # the package raises many types of exceptions, mostly about files and the network
    except Exception as error:
        raise DataError(
            f"`dataset` = {dataset} cannot be loaded: {one_line(error)}. Check the name, its configuration "
            "and the network, or pass a local file or folder."
        ) from error
    if isinstance(loaded, datasets.Dataset):
        return {"train": loaded}
    named = {SPLIT_NAMES.get(name, name): rows for name, rows in loaded.items()}
    return {name: rows for name, rows in named.items() if name in ("train", "validation", "test")}


def _file_identity(path: Path) -> list[Any]:
    about = path.stat()
    return [str(path), about.st_size, about.st_mtime_ns]
