"""HTML pages that are one file, for any screen, light or dark; and plain text in HTML and Markdown.

Fields of run folders may come from others and reach pages and model cards, which are passed on. So each stays
plain text, and local paths lose their folders: templates escape every value, and cards call `markdown`.
"""

import base64
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from matplotlib.figure import Figure

import linrec
from linrec.errors import printable
from linrec.lab import style

# absolute paths: in quotes, where a name may have spaces, and elsewhere. A slash after a letter is a ratio or
# a relative path, and two slashes after a colon are an address.
_ROOT = r"(?:~[\w.-]*/|/(?!/)|[A-Za-z]:[\\/]|\\\\)"
QUOTED = re.compile(rf"""(?<=['"]){_ROOT}[^'"\n]*(?=['"])""")
BARE = re.compile(rf"""(?<![\w/\\.~<$}}\])])(?:file://)?{_ROOT}[^\s'"<>|,;:=&()\[\]{{}}]*""")
# characters with a meaning in Markdown, and what links without brackets begin with
MARKS = re.compile(r"[&<>\[\]`*|#!~\\$@]|(?<![^\W_])_|_(?![^\W_])|(?<=:)//|(?<=www)\.", re.IGNORECASE)


class Picture(NamedTuple):
    """A PNG file with its heading and its caption; the page holds the picture itself."""

    path: Path
    title: str
    caption: str

    @property
    def base64(self) -> Markup:
        """The file as text; marked as safe, because it is long and has no special characters."""
        return Markup(base64.b64encode(self.path.read_bytes()).decode("ascii"))


class Drawing(NamedTuple):
    """A figure with the name of its file, without suffix, its heading and its caption."""

    name: str
    title: str
    caption: str
    figure: Figure | None


def save_pictures(drawings: Iterable[Drawing], folder: Path) -> list[Picture]:
    """Write drawings to a folder, without those that have no figure."""
    return [
        Picture(style.save(figure, folder / f"{name}.png"), title, caption)
        for name, title, caption, figure in drawings
        if figure is not None
    ]


class Table(NamedTuple):
    """A table of plain text; the columns `numbers` are aligned to the right, by default all but the first."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: range

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, str]], numbers: range | None = None) -> "Table":
        """Return a table of rows by heading, some of which may lack columns."""
        rows = list(rows)
        head = list(dict.fromkeys(name for row in rows for name in row))
        cells = [[row.get(name, "") for name in head] for row in rows]
        return cls(head, cells, range(1, len(head)) if numbers is None else numbers)


def render(template: str, **values: Any) -> str:
    """Return a whole page from a file in the folder `templates`; each value is shown as `plain` text."""
    return _templates().get_template(template).render(values, version=linrec.__version__)


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
def _templates() -> Environment:
    made = Environment(
        loader=PackageLoader("linrec.lab"),
        autoescape=True,
        # macros return markup
        finalize=lambda value: value if isinstance(value, Markup) else plain(value),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # a text that a model read or wrote keeps its paths
    made.filters["verbatim"] = lambda text: escape(printable(text))
    made.filters["breakable"] = lambda label: Markup(
        re.sub(r"([(,+:=])", r"\1<wbr>", str(escape(plain(label))))
    )
    return made
