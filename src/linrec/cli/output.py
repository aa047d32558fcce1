"""The output of commands."""

from typing import TextIO

from linrec.errors import printable

__all__ = ["say"]


def say(text: object, *, file: TextIO | None = None) -> None:
    """Print a text with control characters escaped by `printable`, on standard output by default."""
    print(printable(text), file=file)
