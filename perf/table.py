"""The printer of all commands: tables for a terminal of 80 columns, and pictures."""

import string
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console
from rich.table import Table as RichTable

from perf.engine import PASSES
from perf.kernels import KINDS

SHORT = dict(zip(PASSES, ("fwd", "fwd+bwd"), strict=True))
UNITS = {"KiB": 2**10, "GiB": 2**30, "M": 1e6, "%": 0.01}

Record: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """A table with a line for each record.

    Args:
        title: a line above the table; none if it is empty.
        columns: heading and format string of each column, with bars between them, such as
            "row {name} | ms {ms[median]:digits} | GiB {peak_bytes:.2f GiB}"; see `Cells`.
        records: the records. One with "missing" has its reason in place of its numbers.
        left: number of columns that are aligned to the left.
        wrap: headings of the columns whose cells may take several lines.
        width: greatest width of the columns on the right.
        absent: the cell of a number that the record lacks.
    """

    title: str
    columns: str
    records: Sequence[Record]
    left: int = 1
    wrap: Sequence[str] = ()
    width: int | None = None
    absent: str = ""

    def draw(self) -> RichTable:
        columns = [column.partition("{") for column in self.columns.split(" | ")]
        table = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for number, heading in enumerate(heading.strip() for heading, _, _ in columns):
            table.add_column(
                heading,
                justify="left" if number < self.left else "right",
                no_wrap=heading not in self.wrap and (self.width is None or number < self.left),
                max_width=None if number < self.left else self.width,
            )
        for record in self.records:
            missing = [record["missing"]] if "missing" in record else []
            shown = columns[: self.left] if missing else columns
            cells = [Cells(self.absent).vformat(brace + cell, (), record).strip() for _, brace, cell in shown]
            table.add_row(*cells, *missing)
        return table


class Cells(string.Formatter):
    """`str.format` with units behind the digits, as in "{peak_bytes:.2f GiB}", and with absent numbers.

    "digits" are three digits. "yes" says whether a target is met. "ratio" shows the ratio in a peer's entry,
    and whether the ratio is as asked. Each number of a list is formatted.
    """

    def __init__(self, absent: str = "") -> None:
        self.absent = absent

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        try:
            return super().get_field(field_name, args, kwargs)
        except (KeyError, TypeError):
            return None, field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        digits, _, unit = format_spec.partition(" ")
        if unit == "ratio":
            if value is None or "ratio" not in value:
                return "-"
            return f"{value['ratio']:{digits}}" + (f" {yes(value['met'])}" if value.get("asked") else "")
        if value is None:
            return self.absent
        if isinstance(value, list):
            return " ".join(format(number, digits) for number in value)
        if digits == "yes":
            return yes(value)
        if digits == "digits":
            digits = ".0f" if value >= 1000 else ".3g"
        return format(value / UNITS[unit] if unit else value, digits)


Part: TypeAlias = Table | str


def print_parts(console: Console, parts: Iterable[Part]) -> None:
    for part in parts:
        if isinstance(part, str):
            console.print(part, markup=False, highlight=False)
        elif part.records:
            if part.title:
                console.print(f"\n{part.title}", markup=False, highlight=False)
            console.print(part.draw())


def yes(met: bool) -> str:
    return "yes" if met else "no"


def errors(records: Iterable[Record], key: str = "error") -> Iterator[str]:
    """Yield the errors of records, or the reasons why they are missing."""
    return (f"{record['name']}: {record[key]}" for record in records if key in record)


def missing_peers(measured: Sequence[Record]) -> Iterator[str]:
    """Yield why "peers" of linrec's entries are missing, each reason once, and whose outputs differ."""
    found = [(name, entry) for mine in measured for name, entry in mine["peers"].items()]
    off: dict[str, float] = {}
    for name, entry in found:
        if "off" in entry:
            off[name] = max(off.get(name, 0.0), entry["off"])
    for name, most in off.items():
        yield f"{name}: outputs differ from linrec's by up to {most:.0%} of the largest"
    reasons = Counter((name, entry["missing"]) for name, entry in found if "missing" in entry)
    for (name, reason), count in reasons.items():
        yield f"{name}: {reason}" + ("" if count == len(measured) else f" ({count} of {len(measured)})")


def passes_of(rows: Iterable[Record]) -> list[Record]:
    """Return linrec's entry of each pass, with "pass", and with the row's "name" in its first pass."""
    return [
        {**entry, "name": row["name"] if one == PASSES[0] else "", "pass": SHORT[one]}
        for row in rows
        for one, entry in row.get("passes", {}).items()
    ]


def implementations_of(rows: Iterable[Record]) -> list[Record]:
    """Return the entry of each pass and implementation, with "name", "pass" and "implementation"."""
    return [
        {**entry, "name": row["name"], "pass": SHORT[one], "implementation": name}
        for row in rows
        for one, entries in row.get("passes", {}).items()
        for name, entry in entries.items()
    ]


def grid(title: str, headings: Iterable[str], lines: Mapping[str, Iterable[str]], **style: Any) -> Table:
    """Return a table of cells that are given by their line, without a heading over the lines' names."""
    columns = [f"{heading} {{cells[{number}]}}" for number, heading in enumerate(headings)]
    records = [{"name": name, "cells": tuple(cells)} for name, cells in lines.items()]
    return Table(title, " | ".join(["{name}", *columns]), records, **style)


def profiles(records: Iterable[Record], *heading: str) -> Iterator[Table]:
    """Yield percent of the device's time by kind of kernel, for the records with a profile.

    `heading` are the keys of the values that head a record's column.
    """
    records = [record for record in records if "kinds" in record.get("profile", {})]
    headings = ["\n".join(str(record[key]) for key in heading) for record in records]
    shares = [
        {**record["profile"]["kinds"], "idle": {"share": record["profile"]["idle"]}} for record in records
    ]
    lines = {kind: [f"{100 * each[kind]['share']:.1f}" for each in shares] for kind in (*KINDS, "idle")}
    if records:
        yield grid("percent of the device's time in steps", headings, lines, wrap=["", *headings])


def reasons(records: Iterable[Record], *keys: str) -> Iterator[str]:
    """Yield why records, their profiles and their peers are missing; the values of `keys` name a record."""
    for record in records:
        name = ", ".join(str(record[key]) for key in keys)
        peer = f"{name}, flash-linear-attention"
        for of, part in ((name, record), (name, record.get("profile", {})), (peer, record.get("fla", {}))):
            if "missing" in part:
                yield f"{of}: {part['missing']}"


def draw_panels(
    path: Path,
    titles: Sequence[str],
    names: Sequence[str],
    points: Callable[[str, str], Sequence[tuple[int, float]]],
    finish: Callable[[Any, str], None],
    *,
    y: str,
    share_y: bool = False,
    widths: Sequence[float] = (),
) -> Path:
    """Draw curves against length, in two panels with logarithmic axes side by side.

    `points` are those of a curve by the panel's title and the curve's name. `finish` completes the axes of a
    panel. `y` labels the axis on the left. `widths` are the lines' widths.
    """
    # imported here: matplotlib is needed for pictures alone
    from linrec.lab import style

    figure = style.make_figure(3.0)
    panels = figure.subplots(1, 2, sharey=share_y)
    for axes, title in zip(panels, titles, strict=True):
        handles = []
        for place, name in enumerate(names):
            xs, ys = zip(*points(title, name), strict=True) if points(title, name) else ((), ())
            width, colour = widths[place] if widths else 1.6, style.colour(place)
            handles += axes.plot(xs, ys, marker="o", markersize=3, linewidth=width, color=colour, label=name)
        axes.set_title(title, fontsize=style.LETTERS)
        style.finish_axes(axes, x="length (steps)", y=y if axes is panels[0] else "")
        axes.set_xscale("log", base=2)
        # a power law is a straight line
        axes.set_yscale("log")
        finish(axes, title)
    style.add_legend(figure, handles)
    return style.save(figure, path)
