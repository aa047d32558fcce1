"""The printer of all commands: tables for a terminal of 80 columns, and pictures."""

import string
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from rich.console import Console
from rich.table import Table as RichTable

from perf.engine import PASSES
from perf.kernels import KINDS

SHORT = dict(zip(PASSES, ("fwd", "fwd+bwd"), strict=True))
UNITS = {"": 1, "KiB": 2**10, "GiB": 2**30, "M": 1e6, "%": 0.01}

Record: TypeAlias = Mapping[str, Any]
C = TypeVar("C")
Cell: TypeAlias = str | Callable[[Any], str]


@dataclass(frozen=True)
class Table:
    """A table with a line for each record.

    Args:
        title: a line above the table; none if it is empty.
        columns: heading and cells of each column. A cell is a format string over the record, such as
            "{peak_bytes:.2f GiB}" or "{ms[median]:digits}", or a function of the record. A number that the
            record lacks is an empty cell. A record with "missing" has its reason in place of its numbers.
        records: the records.
        left: number of columns that are aligned to the left.
        wrap: headings of the columns whose cells may take several lines.
        width: greatest width of the columns on the right.
    """

    title: str
    columns: Sequence[tuple[str, Cell]]
    records: Sequence[Record]
    left: int = 1
    wrap: Sequence[str] = ()
    width: int | None = None

    def lines(self) -> Iterator[list[str]]:
        """Yield the cells of each line."""
        for record in self.records:
            missing = "missing" in record
            shown = self.columns[: self.left] if missing else self.columns
            cells = [cell(record) if callable(cell) else _cells(cell, record) for _, cell in shown]
            yield [*cells, record["missing"]] if missing else cells


Part: TypeAlias = Table | str


def print_parts(console: Console, parts: Iterable[Part]) -> None:
    """Print tables, but for empty ones, and lines."""
    for part in parts:
        if isinstance(part, str):
            console.print(part, markup=False, highlight=False)
            continue
        if not part.records:
            continue
        table = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for number, (heading, _) in enumerate(part.columns):
            table.add_column(
                heading,
                justify="left" if number < part.left else "right",
                no_wrap=heading not in part.wrap and (part.width is None or number < part.left),
                max_width=None if number < part.left else part.width,
            )
        for cells in part.lines():
            table.add_row(*cells)
        if part.title:
            console.print(f"\n{part.title}", markup=False, highlight=False)
        console.print(table)


class _Formatter(string.Formatter):
    """`str.format` with units behind the digits, with `digits` and `yes`, and without missing values."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        try:
            return super().get_field(field_name, args, kwargs)
        except (KeyError, TypeError):
            return None, field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            return ""
        if format_spec == "digits":
            return number(value)
        if format_spec == "yes":
            return yes(value)
        digits, _, unit = format_spec.partition(" ")
        return format(value / UNITS[unit] if unit else value, digits)


def _cells(text: str, record: Record) -> str:
    return _Formatter().vformat(text, (), record)


def number(milliseconds: float) -> str:
    """Return three digits."""
    return f"{milliseconds:.0f}" if milliseconds >= 1000 else f"{milliseconds:.3g}"


def yes(met: bool) -> str:
    """Return whether a target is met."""
    return "yes" if met else "no"


def ratio_to(peer: str, digits: str = ".2g") -> Callable[[Record], str]:
    """Return a cell: linrec's time over a peer's, and whether it is as asked where a ratio is asked."""

    def cell(entry: Record) -> str:
        found = entry["peers"].get(peer, {})
        if "ratio" not in found:
            return "-"
        return f"{found['ratio']:{digits}}" + ("" if found.get("asked") is None else f" {yes(found['met'])}")

    return cell


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


def grid(
    title: str,
    lines: Iterable[str],
    columns: Iterable[C],
    cell: Callable[[str, C], str],
    *,
    heading: Callable[[C], str] = str,
    **style: Any,
) -> Table:
    """Return a table with the cell of each line and column, without a heading over the lines' names."""

    def in_column(column: C, record: Record) -> str:
        return cell(record["name"], column)

    cells: list[tuple[str, Cell]] = [(heading(column), partial(in_column, column)) for column in columns]
    return Table(title, [("", "{name}"), *cells], [{"name": name} for name in lines], **style)


def profiles(records: Iterable[Record], *heading: str) -> Iterator[Table]:
    """Yield percent of the device's time by kind of kernel, for the records with a profile.

    `heading` are the keys of the values that head a record's column.
    """
    found = {
        "\n".join(str(record[key]) for key in heading): record["profile"]
        for record in records
        if "kinds" in record.get("profile", {})
    }

    def cell(kind: str, name: str) -> str:
        profile = found[name]
        return f"{100 * (profile['idle'] if kind == 'idle' else profile['kinds'][kind]['share']):.1f}"

    if found:
        yield grid("percent of the device's time in steps", (*KINDS, "idle"), found, cell, wrap=["", *found])


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
    points: Callable[[str, str], tuple[Sequence[float], Sequence[float]]],
    *,
    y: str,
    share_y: bool = False,
    widths: Sequence[float] = (),
    finish: Callable[[Any, str], None],
) -> Path:
    """Draw curves against length, in two panels side by side.

    `points` gives x and y of a curve by the panel's title and the curve's name. `finish` completes the axes
    of a panel. `y` labels the axis on the left. `widths` are the lines' widths.
    """
    # imported here: matplotlib is needed for pictures alone
    from linrec.lab.report import style

    figure = style.make_figure(3.0)
    panels = figure.subplots(1, 2, sharey=share_y)
    for axes, title in zip(panels, titles, strict=True):
        handles = []
        for place, name in enumerate(names):
            (line,) = axes.plot(
                *points(title, name),
                marker="o",
                markersize=3,
                linewidth=widths[place] if widths else 1.6,
                color=style.colour(place),
                label=name,
            )
            handles.append(line)
        axes.set_title(title, fontsize=style.LETTERS)
        style.finish_axes(axes, x="length (steps)", y=y if axes is panels[0] else "")
        axes.set_xscale("log", base=2)
        finish(axes, title)
    style.add_legend(figure, handles)
    return style.save(figure, path)
