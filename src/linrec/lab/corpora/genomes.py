"""Sequences of DNA from FASTA files, whole or cut into the intervals of a BED file."""

import gzip
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from linrec.errors import DataError
from linrec.files import reason
from linrec.lab.corpora.texts import SPLIT_NAMES, Advance, file_identity

__all__ = ["Genome", "Interval"]

SUFFIXES = (".fa", ".fasta", ".fna")
LETTERS = frozenset("ACGTN")


class Interval(NamedTuple):
    """The bases [start, stop) of a record, for a split."""

    record: str
    start: int
    stop: int
    split: str


class Genome:
    """The bases of a FASTA file, in upper case; implements `Texts`.

    A line that begins with > has the name of a record, and the lines after it its bases: A, C, G, T, and N
    for unknown ones. Other letters become N. A record is a document; with intervals, each of them is.

    Args:
        path: a file that ends in .fa, .fasta or .fna, or in one of these and .gz.
        intervals: a BED file, whose lines have the name of a record, the first base from 0, the base after
            the last one, and the split, "train", "valid" or "test", separated by tabs. None makes all records
            training text.

    Raises:
        DataError: a file is missing or damaged, or an interval is not in the FASTA file.

    Source: HyenaDNA (Nguyen and others, 2023, arXiv:2306.15794), section 4.1, for the human genome and for
    intervals: hg38.ml.fa, and human-sequences.bed of Basenji (Kelley, 2020).

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "tiny.fa"
        >>> _ = path.write_text(">chr1 first\\nacgt\\nNA\\n>chr2\\nTTxT\\n")
        >>> ["".join(bases) for bases in Genome(path).documents("train", lambda n: None)]
        ['ACGTNA', 'TTNT']
    """

    def __init__(self, path: Path, intervals: Path | None = None) -> None:
        self._path = path.expanduser()
        self._bed = None if intervals is None else intervals.expanduser()
        self._intervals = None if self._bed is None else _intervals(self._bed)
        if not self._path.is_file():
            raise DataError(
                f"`path` = {path} does not exist. Download a genome such as "
                "https://hgdownload.soe.ucsc.edu/goldenPath/hg38/bigZips/hg38.fa.gz."
            )

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits; always includes "train"."""
        return ("train",) if self._intervals is None else tuple(self._intervals)

    def size(self, split: str) -> int:
        """Return the size of the file in bytes, which is read as a whole for each split."""
        return self._path.stat().st_size

    def documents(self, split: str, advance: Advance) -> Iterator[Iterable[str]]:
        """Yield the bases of each record or interval of a split, in the order of the FASTA file."""
        if self._intervals is None:
            for _, bases in self._records(advance):
                yield [bases]
            return
        wanted = self._intervals[split]
        missing = {*wanted}
        for name, bases in self._records(advance):
            missing.discard(name)
            for interval in wanted.get(name, ()):
                if interval.stop > len(bases):
                    raise DataError(
                        f"the intervals of {self._bed} must be within the records of {self._path}; {name} "
                        f"has {len(bases)} bases, and an interval ends at {interval.stop}. The files are of "
                        "different genomes."
                    )
                yield [bases[interval.start : interval.stop]]
        if missing:
            raise DataError(
                f"{self._path} has no record {min(missing)!r}, which {self._bed} names. The files are of "
                "different genomes, or it is truncated."
            )

    def stream(self, split: str, advance: Advance) -> Iterator[str]:
        """Yield the bases of a split, with a newline after each record or interval."""
        for bases in self.documents(split, advance):
            yield from bases
            yield "\n"

    def identity(self) -> Any:
        """Return a JSON value that identifies the text."""
        return {"genome": [file_identity(path) for path in (self._path, self._bed) if path is not None]}

    def _records(self, advance: Advance) -> Iterator[tuple[str, str]]:
        """Yield the name and the bases of each record."""
        name, lines = None, []
        packed = self._path.suffix == ".gz"
        try:
            with (
                gzip.open(self._path, "rt", encoding="ascii") if packed else self._path.open(encoding="ascii")
            ) as file:
                for line in file:
                    # the progress of a packed file is not known
                    advance(0 if packed else len(line))
                    if not line.startswith(">"):
                        lines.append(line.strip())
                        continue
                    if name is not None:
                        yield name, _bases(lines)
                    elif any(lines):
                        raise ValueError(f"the line {lines[0][:40]!r} before the first name")
                    name, lines = (line[1:].split() or [""])[0], []
        except OSError as error:
            raise DataError(f"{self._path} cannot be read: {reason(error)}.") from error
        except (EOFError, zlib.error, ValueError) as error:
            raise DataError(f"{self._path} is not a FASTA file, or it is damaged: {error}.") from error
        if name is None:
            raise DataError(f"{self._path} must have a line of > and a name before its bases; it has none.")
        yield name, _bases(lines)


def is_genome(path: Path) -> bool:
    """Return whether a path is a FASTA file by its name."""
    return path.name.removesuffix(".gz").endswith(SUFFIXES)


def _bases(lines: list[str]) -> str:
    bases = "".join(lines).upper()
    others = {ord(letter): "N" for letter in {*bases} - LETTERS}
    return bases.translate(others) if others else bases


def _intervals(path: Path) -> dict[str, dict[str, list[Interval]]]:
    """Return the intervals of a BED file by split and record."""
    found: dict[str, dict[str, list[Interval]]] = {}
    try:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            fields = line.split("\t")
            try:
                interval = Interval(fields[0], int(fields[1]), int(fields[2]), SPLIT_NAMES[fields[3].strip()])
                if not 0 <= interval.start < interval.stop:
                    raise ValueError("an empty interval")
            except (IndexError, KeyError, ValueError) as error:
                raise DataError(
                    f"{path} must have a name, two numbers, and train, valid or test in each line, "
                    f"separated by tabs; got {line[:60]!r} in line {number}."
                ) from error
            found.setdefault(interval.split, {}).setdefault(interval.record, []).append(interval)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(
            f"`intervals` = {path} cannot be read: {why}. Download human-sequences.bed of "
            "Basenji, by the README of https://github.com/HazyResearch/hyena-dna."
        ) from error
    if "train" not in found:
        raise DataError(f"{path} has no interval of the split 'train'.")
    return found
