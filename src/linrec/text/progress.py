"""How far reading and tokenising is: bars on a terminal, plain lines elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from linrec.extras import import_extra
from linrec.text.texts import Advance

if TYPE_CHECKING:
    from rich.console import Console


class ReadingDisplay:
    """Shows how much of a text has been read.

    Args:
        console: where to write; None is standard error, so that results on standard output stay clean.

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
        """Show a bar for as long as the context lasts; yield what moves it.

        Args:
            what: what is done.
            size: how much there is to read.
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
            # a part of a text is done before all of it is read
            progress.update(bar, completed=size)
