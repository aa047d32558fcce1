"""Pairs of texts in two languages, from files of lines or a Hugging Face data set."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from linrec.errors import DataError, unknown
from linrec.files import inside, reason
from linrec.lab.corpora.corpus import ReadingDisplay
from linrec.lab.corpora.rows import load_splits
from linrec.lab.corpora.texts import Advance

__all__ = ["Pair", "read_pairs"]

# names of the files of a folder, and their splits
FILES = {
    "train": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
}
WANTED = (
    "Pass a folder with a file per split and language, such as train.de and train.en, with --data.path; or "
    "--data.dataset NAME. --data.source and --data.target name the languages."
)


class Pair(NamedTuple):
    """A source and its translation."""

    source: str
    target: str


def read_pairs(
    source: str, target: str, *, path: Path | None, dataset: str | None, config: str | None = None
) -> dict[str, list[Pair]]:
    """Return the pairs of each split, without the spaces around a text.

    Args:
        source: the language of the sources, as files and columns name it.
        target: the language of the translations.
        path: a folder with two files per split, such as train.de and train.en, whose n-th lines are a pair.
        dataset: name or path of a Hugging Face data set, with a column "translation" of texts by language, or
            a column for each language. Pass this or `path`.
        config: configuration of the data set, if it has several.

    Returns:
        Pairs by split; always a split "train" that is not empty.

    Raises:
        DataError: the pairs cannot be read, have no training split, or a file lacks its translation.
    """
    if path is not None:
        found = _of_folder(path, source, target)
    elif dataset is not None:
        found = _of_dataset(dataset, config, source, target)
    else:
        raise DataError(f"exactly one of `path` and `dataset` must be given; got neither. {WANTED}")
    if not found.get("train"):
        raise DataError(f"the pairs must have a training split with text; got none. {WANTED}")
    return found


def _of_folder(folder: Path, source: str, target: str) -> dict[str, list[Pair]]:
    if not folder.is_dir():
        raise DataError(f"`path` = {folder} must be a folder. {WANTED}")
    found: dict[str, list[Pair]] = {}
    for name, split in FILES.items():
        files = [folder / f"{name}.{language}" for language in (source, target)]
        there = [file for file in files if file.is_file()]
        if len(there) == 1:
            missing = next(file for file in files if file not in there)
            raise DataError(f"{there[0]} has no translation: there is no {missing.name}. {WANTED}")
        if there and split in found:
            raise DataError(f"{folder} has several files of the split {split!r}. Keep one of them.")
        if there:
            found[split] = _of_files(files)
    return found


def _of_files(files: Sequence[Path]) -> list[Pair]:
    sides = []
    for file in files:
        try:
            text = inside(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{file} cannot be read: {reason(error)}.") from error
        # other marks of lines are a part of the text
        lines = text.split("\n")
        sides.append(lines[:-1] if lines[-1] == "" else lines)
    if len(sides[0]) != len(sides[1]):
        raise DataError(
            f"{files[0]} and {files[1]} must have equally many lines, a pair each; they have "
            f"{len(sides[0])} and {len(sides[1])}."
        )
    return [Pair(*(side.strip() for side in pair)) for pair in zip(*sides, strict=True)]


def _of_dataset(dataset: str, config: str | None, source: str, target: str) -> dict[str, list[Pair]]:
    found = {}
    for name, rows in load_splits(dataset, config=config).items():
        with ReadingDisplay().reading(f"reading {name} of {dataset}", len(rows)) as advance:
            found[name] = [*_of_rows(rows, dataset, (source, target), advance)]
    return found


def _of_rows(rows: Any, dataset: str, languages: tuple[str, str], advance: Advance) -> Iterator[Pair]:
    nested = "translation" in rows.column_names
    for batch in rows.with_format(None).iter(1000):
        columns = batch
        if nested:
            columns = {name: [row[name] for row in batch["translation"]] for name in batch["translation"][0]}
        for language in languages:
            if language not in columns:
                raise DataError(f"`dataset` = {dataset}: {unknown('language', language, columns)}")
        sides = (columns[language] for language in languages)
        for pair in zip(*sides, strict=True):
            yield Pair(*((text or "").strip() for text in pair))
        advance(len(columns[languages[0]]))
