"""Tables of the page on coverage: everything that the sources name, from `coverage.ini`.

A section of that file is a part of a source, and a line of it is a row of the page:

    Performer = linear_attention(feature_map="performer") | tests | results

The name in linrec is a mixer, or has its kind in front of it: `operator`, `memory`, `preset`, `learner`,
`task` or `stream`. Dotted paths are objects, and `linrec ...` and `python -m perf ...` are commands.
Semicolons separate several names. `open`, or `open: the missing part`, stands in the place of the names or
after them, and `left out: the reason` in the place of the names. A row without tests has the usual tests of
its names, `TESTS`. Results are headings of pages below docs, or paths in the source tree.
"""

import ast
import configparser
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "docs/coverage.ini"
Table: TypeAlias = tuple[Sequence[str], Sequence[Sequence[str]]]
"""A header and rows."""

BEYOND = "Beyond the sources"
"""The section of what no source names."""
PAGES = {
    "mixer": "mixers/{}.md",
    "operator": "operators/{}.md",
    "memory": "memories/{}.md",
    "preset": "models.md#presets",
    "learner": "learning.md#which-learner",
    "task": "tasks.md",
    "stream": "learning.md#streams",
}
TESTS = {
    "mixer": "tests/mixers/test_{}.py",
    "operator": "tests/ops/test_{}.py",
    "memory": "tests/models/test_{}.py",
    "preset": "tests/models/test_config_and_presets.py",
    "learner": "tests/learning/test_learners.py",
    "stream": "tests/lab/streams/test_streams.py",
}
NAME = re.compile(rf"(?:({'|'.join(PAGES)}) )?([\w-]+)(?:\((.*)\))?")


class Name(NamedTuple):
    """A name in linrec: its kind, the name without arguments, the arguments as text, and the whole text."""

    kind: str
    base: str
    given: str
    text: str

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments."""
        call = ast.parse(f"f({self.given})", mode="eval").body
        assert isinstance(call, ast.Call)
        return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}

    @property
    def link(self) -> str:
        """The name in Markdown."""
        if self.kind == "command":
            return f"`{self.text}`"
        if self.kind == "object":
            return f"[`{'.'.join(self.text.split('.')[-2:])}`][{self.text}]"
        # arguments outside of the link, because links stay in a line
        given = ", ".join(f"`{name}={value!r}`".replace("'", '"') for name, value in self.arguments.items())
        kind = f"{self.kind} " * (self.kind != "mixer")
        return f"{kind}[`{self.base}`]({PAGES[self.kind].format(self.base)})" + f" with {given}" * bool(given)


class Row(NamedTuple):
    """A row of the page: a name in a section of a source, and its names, tests and results in linrec."""

    section: str
    what: str
    names: tuple[Name, ...]
    missing: str
    given_tests: tuple[str, ...]
    results: tuple[str, ...]

    @property
    def is_open(self) -> bool:
        """Whether something is still to be done."""
        return self.missing.startswith("open")

    @property
    def tests(self) -> tuple[str, ...]:
        """The files of its tests."""
        usual = (TESTS[name.kind].format(name.base) for name in self.names if name.kind in TESTS)
        return self.given_tests or tuple(dict.fromkeys(usual))


def rows() -> list[Row]:
    """Return the rows of the file, in its order.

    Raises:
        ValueError: a row is neither in linrec nor open nor left out with a reason.
    """
    # names of systems have colons and capitals
    parser = configparser.ConfigParser(delimiters=("=",), comment_prefixes=("#",), interpolation=None)
    parser.optionxform = str
    parser.read_string(SOURCE.read_text())
    return [parsed(name, *line) for name in parser.sections() for line in parser.items(name)]


def parsed(section: str, what: str, value: str) -> Row:
    """Return the row of the line `what = value`."""
    cells = [" ".join(cell.split()) for cell in value.split("|")]
    names, tests, results = (*cells, "", "")[:3]
    # the text about the missing part may have semicolons too
    named, missing = re.fullmatch(r"(.*?)(?:(?:^|; )(open(?:: .+)?|left out: .+))?", names).groups("")
    entries = [entry.strip() for entry in named.split(";") if entry.strip()]
    if len(cells) > 3 or not (entries or missing) or (entries and missing.startswith("left out")):
        raise ValueError(f"`{what}` in `{SOURCE.name}` must be names, tests and results; got {value!r}.")
    return Row(section, what, tuple(map(_name, entries)), missing, (*tests.split(),), (*results.split(),))


def _name(text: str) -> Name:
    if text.startswith(("linrec ", "python -m perf ")):
        return Name("command", text, "", text)
    if text.startswith("linrec."):
        return Name("object", text, "", text)
    found = NAME.fullmatch(text)
    if found is None:
        raise ValueError(f"a name in `{SOURCE.name}` must be a mixer or start with its kind; got {text!r}.")
    return Name(found[1] or "mixer", found[2], found[3] or "", text)


def summary() -> Table:
    """How many rows of each section are in linrec, have results, are open, or are left out."""
    counts: dict[str, Counter[str]] = {}
    for row in rows():
        counts.setdefault(row.section, Counter()).update(
            {
                "rows": 1,
                "in linrec": bool(row.names) and not row.is_open,
                "with a result": bool(row.results),
                "open": row.is_open,
                "left out": row.missing.startswith("left out"),
            }
        )
    header = ("rows", "in linrec", "with a result", "open", "left out")
    lines = [(f"[{section}](#{slug(section)})", count) for section, count in counts.items()]
    lines.append(("all", sum(counts.values(), Counter())))
    return ("section", *header), [(title, *(str(count[key]) for key in header)) for title, count in lines]


def sections() -> list[tuple[str, Table]]:
    """Return the sections, each with its table."""
    tables: dict[str, list[tuple[str, ...]]] = {}
    for row in rows():
        named = ", ".join((*(name.link for name in row.names), *_missing(row)))
        shown = (*(f"`{_short(test)}`" for test in row.tests), *map(_result, row.results))
        tables.setdefault(row.section, []).append((row.what, named, "<br>".join(shown)))
    header = ("named", "in linrec", "tests and results")
    return [(section, (header, lines)) for section, lines in tables.items()]


def _missing(row: Row) -> tuple[str, ...]:
    word, *reason = row.missing.split(":", 1)
    return (":".join([f"**{word}**", *reason]),) if word else ()


def _short(test: str) -> str:
    """Return a test's file without what all of them have."""
    return re.sub(r"^tests/|test_(?=\w+\.py)|\.py$", "", test)


def _result(path: str) -> str:
    if ".md" not in path:
        return f"`{path}`"
    page, _, anchor = path.partition("#")
    found = headings(page)
    return f"[{found[anchor] if anchor else next(iter(found.values()))}]({path})"


def headings(page: str) -> dict[str, str]:
    """Return the headings of a page below docs, by their anchors."""
    found = re.findall(r"^#+ (.+)$", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    return {slug(heading): heading for heading in found}


def slug(heading: str) -> str:
    """Return the anchor of a heading, as MkDocs makes it."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


TABLES: dict[str, Callable[[], Table]] = {"coverage_summary": summary}
