"""Pages as data, written as HTML that is one file, for any screen; and plain text in HTML and Markdown.

Reports, suites and inspections choose the rows of their tables and the lines of their pictures, which
`linrec.lab.style` draws as panels. A page is a list of blocks, and one template shows every kind of block.

Fields of run folders may come from others and reach pages and model cards, which are passed on. So each stays
plain text, and local paths lose their folders: the template escapes every value, and cards call `markdown`.
"""

import base64
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple, TypeAlias

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from matplotlib.figure import Figure

from linrec.errors import printable
from linrec.lab import style

# absolute paths: in quotes, where a name may have spaces, and elsewhere. A slash after a letter is a ratio or
# a relative path, and two slashes after a colon are an address.
_ROOT = r"(?:~[\w.-]*/|/(?!/)|[A-Za-z]:[\\/]|\\\\)"
QUOTED = re.compile(rf"""(?<=['"]){_ROOT}[^'"\n]*(?=['"])""")
BARE = re.compile(rf"""(?<![\w/\\.~<$}}\])])(?:file://)?{_ROOT}[^\s'"<>|,;:=&()\[\]{{}}]*""")
# characters with a meaning in Markdown, and what links without brackets begin with
MARKS = re.compile(r"[&<>\[\]`*|#!~\\$@]|(?<![^\W_])_|_(?![^\W_])|(?<=:)//|(?<=www)\.", re.IGNORECASE)


@dataclass(frozen=True)
class Text:
    """A heading, a note, or lines; "verbatim" is a text that a model read or wrote, which keeps its paths."""

    block: Literal["heading", "note", "lines", "verbatim"]
    text: str


class Cell(NamedTuple):
    """A cell of a table: its text, its class in CSS, the value that it is sorted by, and a text to unfold."""

    text: str
    kind: str = ""
    value: float | str | None = None
    more: str = ""


@dataclass(frozen=True)
class Table:
    """A table of cells."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    block: ClassVar = "table"

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, str | Cell]], numbers: range | None = None) -> "Table":
        """Return a table of rows by heading, some of which may lack columns.

        Texts in the columns `numbers` are aligned to the right, by default all but those of the first column.
        """
        rows = list(rows)
        head = list(dict.fromkeys(name for row in rows for name in row))
        numbers = range(1, len(head)) if numbers is None else numbers
        kinds = {name: "number" if place in numbers else "" for place, name in enumerate(head)}

        def cell(row: Mapping[str, str | Cell], name: str) -> Cell:
            found = row.get(name, "")
            return found if isinstance(found, Cell) else Cell(found, kinds[name])

        return cls(head, [[cell(row, name) for name in head] for row in rows])


class Picture(NamedTuple):
    """A figure with its heading, its caption and the name of its file, without suffix; None draws nothing."""

    name: str
    title: str
    caption: str
    figure: Figure | None


@dataclass(frozen=True)
class Gallery:
    """Pictures: titles, captions and PNG files in base64; in columns if the page is wide."""

    pictures: Sequence[tuple[str, str, Markup]]
    block: ClassVar = "gallery"

    @classmethod
    def saved(cls, pictures: Iterable[Picture], folder: Path) -> "Gallery":
        """Write pictures to a folder, without those that have no figure."""
        shown = []
        for name, title, caption, figure in pictures:
            if figure is not None:
                png = style.save(figure, folder / f"{name}.png").read_bytes()
                # safe, because it is long and has no special characters
                shown.append((title, caption, Markup(base64.b64encode(png).decode("ascii"))))
        return cls(shown)


Block: TypeAlias = Text | Table | Gallery


def render(
    title: str,
    about: str,
    blocks: Iterable[Block],
    *,
    missing: Sequence[str] = (),
    heading: str | None = None,
    sortable: bool = False,
) -> str:
    """Return a page as HTML; each value is shown as `plain` text.

    Args:
        title: title of the window.
        about: a line below the heading.
        blocks: the content.
        missing: a sentence for each missing part.
        heading: heading of the page; None is the title.
        sortable: whether a reader can sort and filter its table, for which the page is wider.
    """
    template = _environment().get_template("page.html")
    return template.render(
        title=title, about=about, blocks=blocks, missing=missing, heading=heading or title, sortable=sortable
    )


def without_folders(value: object) -> str:
    """Return a text in which absolute local paths have lost their folders."""
    return BARE.sub(_name, QUOTED.sub(_name, str(value)))


def plain(value: object) -> str:
    """Return a text without control characters and folders of local paths."""
    return printable(without_folders(value))


def markdown(value: object) -> str:
    """Return a plain text as one line of Markdown.

    Characters with a meaning in Markdown are written as entities, which are text inside of HTML tags too.
    """
    line = " ".join(plain(value).split())
    return MARKS.sub(lambda found: "".join(f"&#{ord(mark)};" for mark in found[0]), line)


def _name(path: re.Match[str]) -> str:
    return re.split(r"[\\/]", path[0].rstrip("\\/"))[-1] or "/"


@functools.cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("linrec.lab"),
        autoescape=True,
        # macros return markup
        finalize=lambda value: value if isinstance(value, Markup) else plain(value),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["verbatim"] = lambda text: escape(printable(text))
    made.filters["breakable"] = lambda label: Markup(
        re.sub(r"([(,+:=])", r"\1<wbr>", str(escape(plain(label))))
    )
    return made
