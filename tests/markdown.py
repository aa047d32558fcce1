"""Markdown files as their readers use them: code, commands, links."""

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block: its language, its text, and whether it stands right below the block before it."""

    language: str
    text: str
    follows: bool


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    markdown = page.read_text()
    found, end = [], 0
    for fence in FENCE.finditer(markdown):
        found.append(Block(fence[1], fence[2], end > 0 and not markdown[end : fence.start()].strip()))
        end = fence.end()
    return found


def prose(page: Path) -> str:
    """The text of a page between its blocks."""
    return FENCE.sub("", page.read_text())


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every command of a page, the folder of the program left out."""
    for block in blocks(page):
        if block.language == "bash":
            for line in block.text.replace("\\\n", " ").splitlines():
                if words := shlex.split(line, comments=True):
                    yield [words[0].rpartition("/")[2], *words[1:]]


def execute(code: str, name: str, namespace: dict[str, object]) -> str:
    """Run code and return what it prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, name, "exec"), namespace)
    return out.getvalue()
