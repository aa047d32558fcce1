"""Parts of HTML pages that are one file, for any screen, light or dark; and plain text in HTML and Markdown.

Fields of run folders may come from others and reach pages and model cards, which are passed on. So each goes
through `text` or `markdown`: it stays plain text, and local paths lose their folders.
"""

import base64
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from linrec.errors import printable

# absolute paths: in quotes, where a name may have spaces, and elsewhere. A slash after a letter is a ratio or
# a relative path, and two slashes after a colon are an address.
_ROOT = r"(?:~[\w.-]*/|/(?!/)|[A-Za-z]:[\\/]|\\\\)"
QUOTED = re.compile(rf"""(?<=['"]){_ROOT}[^'"\n]*(?=['"])""")
BARE = re.compile(rf"""(?<![\w/\\.~<$}}\])])(?:file://)?{_ROOT}[^\s'"<>|,;:=&()\[\]{{}}]*""")
# characters with a meaning in Markdown, and what links without brackets begin with
MARKS = re.compile(r"[&<>\[\]`*|#!~\\$@]|(?<![^\W_])_|_(?![^\W_])|(?<=:)//|(?<=www)\.", re.IGNORECASE)

STYLE = """
:root {
  color-scheme: light dark;
  --text: #1b1b1b; --soft: #5c5c5c; --line: #d9d9d9; --page: #fff; --box: #f5f5f5;
}
@media (prefers-color-scheme: dark) {
  :root { --text: #e8e8e8; --soft: #a9a9a9; --line: #3d3d3d; --page: #161616; --box: #212121; }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 60rem;
  background: var(--page); color: var(--text); font: 1rem/1.5 system-ui, sans-serif;
}
h1 { font-size: 1.6rem; margin: 0 0 .25rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; }
p { margin: .5rem 0; }
.soft, figcaption { color: var(--soft); font-size: .9rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td {
  padding: .4rem .9rem .4rem 0; border-bottom: 1px solid var(--line);
  text-align: left; white-space: nowrap;
}
thead th { color: var(--soft); font-weight: 500; }
.number { text-align: right; }
figure { margin: .75rem 0 0; max-width: 42rem; }
figure img {
  display: block; width: 100%; height: auto; padding: .5rem; border-radius: .5rem; background: #fff;
}
figcaption { margin-top: .5rem; }
pre {
  padding: .75rem; border-radius: .5rem; background: var(--box); overflow-x: auto;
  font: .85rem/1.5 ui-monospace, monospace;
}
.sample { white-space: pre-wrap; overflow-wrap: anywhere; }
aside { padding: .5rem 1rem; border-left: 3px solid #e69f00; background: var(--box); }
aside ul { margin: .25rem 0; padding-left: 1.25rem; overflow-wrap: anywhere; }
"""


@dataclass(frozen=True)
class Picture:
    """A picture of the page.

    Attributes:
        path: the PNG file.
        title: its heading.
        caption: description of the picture.
    """

    path: Path
    title: str
    caption: str


def without_folders(value: object) -> str:
    """Return a text in which absolute local paths have lost their folders.

    Example:
        >>> without_folders("/home/me/bin/linrec train lm --data.path '/home/me/a b/rose.txt' --out runs/a")
        "linrec train lm --data.path 'rose.txt' --out runs/a"
    """
    return BARE.sub(_name, QUOTED.sub(_name, str(value)))


def _name(path: re.Match[str]) -> str:
    return re.split(r"[\\/]", path[0].rstrip("\\/"))[-1] or "/"


def text(value: object) -> str:
    """Return a plain text as HTML, without control characters and folders of local paths.

    Example:
        >>> text("<b> of /home/me/run")
        '&lt;b&gt; of run'
    """
    return escape(printable(without_folders(value)))


def markdown(value: object) -> str:
    """Return a plain text as one line of Markdown, without control characters and folders of local paths.

    Characters with a meaning in Markdown are written as entities, which are text inside of HTML tags too.

    Example:
        >>> markdown("[a](b)\\n# my_text")
        '&#91;a&#93;(b) &#35; my_text'
    """
    line = " ".join(printable(without_folders(value)).split())
    return MARKS.sub(lambda found: "".join(f"&#{ord(mark)};" for mark in found[0]), line)


def document(title: str, parts: Iterable[str]) -> str:
    """Return a whole page.

    Args:
        title: title of the window, as plain text.
        parts: HTML, in order; empty parts are left out.
    """
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body>\n</html>\n"
    )


def missing(sentences: Sequence[str]) -> str:
    """Return a box that lists the missing parts, or an empty text for an empty list."""
    if not sentences:
        return ""
    return (
        "<aside><p>What is missing:</p><ul>"
        + "".join(f"<li>{text(sentence)}</li>" for sentence in sentences)
        + "</ul></aside>"
    )


def picture(picture: Picture) -> str:
    """Return a picture with heading and caption; its file is stored inside."""
    data = base64.b64encode(picture.path.read_bytes()).decode("ascii")
    return (
        f"<h2>{text(picture.title)}</h2>\n"
        f'<figure><img alt="{text(picture.title)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{text(picture.caption)}</figcaption></figure>"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: range) -> str:
    """Return a table of plain text.

    Args:
        head: titles of the columns.
        rows: cells.
        numbers: columns that are aligned to the right.
    """

    def cells(tag: str, values: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=number' * (column in numbers)}>{text(value)}</{tag}>"
            for column, value in enumerate(values)
        )

    body = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table>\n<thead><tr>{cells("th", head)}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )
