"""Progress of reading and tokenising: bars on a terminal, plain lines elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from linrec.extras import import_extra
from linrec.lab.corpora.texts import Advance

if TYPE_CHECKING:
    from rich.console import Console


class ReadingDisplay:
    """Shows the progress of reading a text.

    Args:
        console: console to write to; None is standard error, which keeps progress out of standard output.

    Example:
        >>> from rich.console import Console
        >>> with ReadingDisplay(Console(force_terminal=False)).reading("tokenising train", 2) as advance:
        ...     advance(1)
        tokenising train
    """

    def __init__(self, console: "Console | None" = None) -> None:
        rich = import_extra("rich.console", "showing how much has been read")
        self._console: Console = rich.Console(stderr=True) if console is None else console

    def say(self, what: str) -> None:
        """Print a line."""
        self._console.print(what, soft_wrap=True, highlight=False)

    @contextmanager
    def reading(self, what: str, size: int) -> Iterator[Advance]:
        """Show a progress bar within the context; yield the function that advances it.

        Args:
            what: label of the bar.
            size: total amount to read.
        """
        if not self._console.is_terminal:
            self.say(what)
            yield lambda read: None
            return
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(None),
            TaskProgressColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self._console, expand=True) as progress:
            bar = progress.add_task(what, total=size)
            yield lambda read: progress.advance(bar, read)
            # reading a part of a text ends before its whole size is read
            progress.update(bar, completed=size)
