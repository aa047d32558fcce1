"""A command: its options, its rows, and the file and the tables of their records."""

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

import torch
from rich.console import Console

from linrec.errors import unknown
from linrec.lab.train.progress import Interrupt
from linrec.lab.train.records import provenance
from perf.engine import Record
from perf.table import Part, print_parts
from perf.timing import BUDGET, OUT_OF_MEMORY, WINDOWS, Bench, Budget, Windows

Device: TypeAlias = Literal["cuda", "cpu"]
R = TypeVar("R")

HERE: Device = "cuda" if torch.cuda.is_available() else "cpu"


class RefusedError(ValueError):
    """The options do not fit together or name something unknown; the message says what to do."""


class Named:
    """Base of rows, which are dataclasses with a name made of their fields."""

    # a format string over `row`
    template: ClassVar[str]

    @property
    def name(self) -> str:
        return self.template.format(row=self)

    def head(self) -> Record:
        """Return the head of the row's record: its name and its fields."""
        return {"name": self.name, **dataclasses.asdict(self)}  # type: ignore[call-overload]


@dataclass(frozen=True)
class Command:
    """Base of all commands: its fields are the options, its rows are measured one after the other.

    Args:
        device: where to measure; by default on CUDA where there is one.
        quick: tiny sizes and few repetitions, to see that all of it runs; the numbers mean nothing.
        out: folder of the files, by default `results/COMMAND`, and `results/ops` for operators.
    """

    device: Device = HERE
    quick: bool = False
    out: Path | None = None

    # not options: packages whose versions are recorded if they are installed, the list of the records, how
    # long calls are measured, and reasons why a record is missing that are no failure
    packages: ClassVar[Sequence[str]] = ()
    key: ClassVar[str] = "rows"
    budget: ClassVar[Budget] = BUDGET
    windows: ClassVar[Windows] = WINDOWS
    expected: ClassVar[tuple[str, ...]] = (OUT_OF_MEMORY,)

    @property
    def folder(self) -> str:
        return type(self).__name__.lower()

    @property
    def suffix(self) -> str:
        """Follows the device in the file's name."""
        return ""

    def chosen(self) -> Mapping[str, Any]:
        """Return the rows to measure by name, or raise ValueError for wrong options."""
        raise NotImplementedError

    def about(self, bench: Bench) -> tuple[Bench, Record]:
        """Return the bench with its yardsticks, and the fields of the results beside the records."""
        return bench, {}

    def measure(self, bench: Bench, row: Any) -> Record:
        """Measure a row; a record with "error" or "missing" has no numbers."""
        raise NotImplementedError

    @staticmethod
    def show(results: Record) -> Iterator[Part]:
        """Yield the tables of the results, and the lines below them."""
        raise NotImplementedError

    def draw(self, results: Record, path: Path) -> Path | None:
        """Draw the results if the command has a picture, and return its path."""
        return None

    def run(self, rows: Mapping[str, Any], line: str) -> int:
        """Measure the rows, write and print the results; return the exit status."""
        bench, fields = self.about(self.bench())
        report = Report(self, line, **fields)
        report.measure(rows, partial(self.measure, bench))
        return report.finish()

    def bench(self) -> Bench:
        """Return the device and the times of its measurements; `quick` takes the shortest."""
        if self.quick:
            return Bench(torch.device(self.device), Budget(1, 5), Windows(2, 0.0))
        return Bench(torch.device(self.device), self.budget, self.windows)


@dataclass(frozen=True)
class RowCommand(Command):
    """Base of the commands whose rows have names of their own.

    Args:
        rows: names of the rows to measure, all by default; an unknown name lists them.
    """

    rows: tuple[str, ...] = ()

    def all_rows(self) -> Iterable[Any]:
        """Return the rows of the device; with `quick`, the same kinds of rows at a meaningless size."""
        raise NotImplementedError

    def chosen(self) -> dict[str, Any]:
        return selected(self.rows, by_name(self.all_rows()))


class Report:
    """The results of one call of a command, written to a file after each measurement."""

    def __init__(self, command: Command, line: str, **fields: Any) -> None:
        self.command = command
        about = provenance(torch.device(command.device))
        for package in command.packages:
            try:
                about["versions"][package] = metadata.version(package)
            except metadata.PackageNotFoundError:
                continue
        self.results: Record = {"command": line, **about, **fields, command.key: []}
        device = re.sub("[^a-z0-9]+", "-", about["device"]["name"].lower()).strip("-")
        folder = command.out or Path("results", command.folder)
        self.path = folder / f"{device}{command.suffix}.json"
        self.stopped = False

    def measure(self, rows: Mapping[str, R], measurement: Callable[[R], Record]) -> None:
        """Append the record of each row to its list, the command's by default; an interrupt ends it early."""
        with Interrupt(lambda: say("no more after this: stopped")) as interrupt:
            for name, row in rows.items():
                if interrupt.requested:
                    break
                say(name)
                # the command's list, but for rows of another one
                key = getattr(row, "key", self.command.key)
                self.results.setdefault(key, []).append(measurement(row))
                self.write()
                if self.command.device == "cuda":
                    torch.cuda.empty_cache()
        self.stopped |= interrupt.requested

    def write(self) -> None:
        """Write the results as JSON, in a folder that is made if need be."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.results, indent=2) + "\n")

    def finish(self) -> int:
        """Print the results at 80 columns; return 1 if a record failed or the command was interrupted."""
        console = Console(width=min(Console().width, 80))
        print_parts(console, self.command.show(self.results))
        print(f"\nwrote {self.path}")
        if picture := self.command.draw(self.results, self.path.with_suffix(".png")):
            print(f"wrote {picture}")
        lists = (self.results.get(key, ()) for key in ("rows", "lines", "models", "points"))
        records = [record for records in lists for record in records]
        records += [record["profile"] for record in records if "profile" in record]
        fine = (None, *self.command.expected)
        failed = any("error" in record or record.get("missing") not in fine for record in records)
        return int(failed or self.stopped)


def say(text: str) -> None:
    print(f"measuring {text}", file=sys.stderr, flush=True)


def check_names(kind: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise ValueError, with the nearest name, for the first name that is not known."""
    known = list(known)
    for name in names:
        if name not in known:
            raise unknown(kind, name, known)


def check_profile(command: Any) -> None:
    if command.profile and command.device != "cuda":
        raise RefusedError("--profile is for CUDA; leave it out, or pass --device cuda.")


def selected(names: Sequence[str], rows: Mapping[str, R]) -> dict[str, R]:
    """Return the rows of these names, all if there are no names."""
    check_names("row", names, rows)
    return {name: row for name, row in rows.items() if name in (names or rows)}


def by_name(rows: Iterable[Any]) -> dict[str, Any]:
    return {row.name: row for row in rows}
