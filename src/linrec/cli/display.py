"""Tables of results, and the progress of parallel runs: live on a terminal, plain lines elsewhere."""

from collections.abc import Iterable, Sequence
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from linrec.lab.train.progress import Progress


def show_table(titles: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> None:
    """Print a table whose first `left` columns are words, and whose other columns are numbers."""
    table = Table(box=None, padding=(0, 1, 0, 0), show_edge=False, header_style="dim")
    for place, title in enumerate(titles):
        table.add_column(title, justify="left" if place < left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    # names may contain square brackets, which rich would read as markup
    Console(markup=False).print(table)


class Display:
    """Shows step, loss, accuracy, steps per second and remaining time of named runs; a context manager."""

    def __init__(self, names: Sequence[str], console: Console | None = None) -> None:
        self._console = Console() if console is None else console
        self._rows: dict[str, Progress | None] = dict.fromkeys(names)
        # transient: the table disappears at the end
        self._live = Live(
            console=self._console, refresh_per_second=4, get_renderable=self._table, transient=True
        )

    def __enter__(self) -> "Display":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def update(self, name: str, progress: Progress) -> None:
        """Show the progress of a run; without a terminal, print only logged steps."""
        self._rows[name] = progress
        # a request to stop arrives in a signal handler, which may interrupt a print and must not print itself
        if self._console.is_terminal or not progress.logged:
            return
        place = f"{name}: step {progress.step}/{progress.total_steps}, "
        accuracy = "" if progress.accuracy is None else f"accuracy {progress.accuracy:.3f}, "
        speed = f"{progress.steps_per_second:.1f} steps/s, "
        line = f"{place}loss {_loss(progress)}, {accuracy}{speed}{_left(progress)} left"
        # soft wrap prints a line as a single line, even on a narrow terminal
        self._console.print(line, soft_wrap=True, highlight=False)

    def _table(self) -> Table:
        # leave room for the ^C that the terminal writes on the same line
        width = self._console.width - 3
        table = Table(box=None, width=width, padding=(0, 1, 0, 0), show_edge=False, header_style="dim")
        # a single run is shown without its name, to save width
        table.add_column("run" if len(self._rows) > 1 else "", no_wrap=True)
        table.add_column("step", justify="right", no_wrap=True)
        table.add_column("", ratio=1, min_width=4)
        # a regression has no accuracy
        accuracy = any(p is None or p.loss is None or p.accuracy is not None for p in self._rows.values())
        for title in ("loss", *(["accuracy"] if accuracy else []), "steps/s", "left"):
            table.add_column(title, justify="right", no_wrap=True)
        for name, progress in self._rows.items():
            label = name if len(self._rows) > 1 else ""
            if progress is None:
                table.add_row(label, "starting", ProgressBar(total=1, completed=0))
                continue
            right = "" if progress.accuracy is None else f"{progress.accuracy:.3f}"
            speed = progress.steps_per_second
            table.add_row(
                label,
                f"{progress.step}/{progress.total_steps}",
                ProgressBar(total=progress.total_steps, completed=progress.step),
                _loss(progress),
                *([right] if accuracy else []),
                "" if speed is None else f"{speed:.1f}",
                _left(progress) if progress.doing == "training" else progress.doing,
            )
        if any(progress is not None and progress.doing == "stopping" for progress in self._rows.values()):
            table.caption = "stopping after this step; Ctrl-C again stops at once"
        return table


def _loss(progress: Progress) -> str:
    if progress.loss is None:
        return ""
    # significant digits, because squared errors may be small
    return f"{progress.loss:.3g}" if progress.accuracy is None else f"{progress.loss:.3f}"


def _left(progress: Progress) -> str:
    if progress.seconds_left is None:
        return ""
    minutes, seconds = divmod(round(progress.seconds_left), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
