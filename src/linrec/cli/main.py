"""The entry point of every command, kept free of slow imports so that Ctrl-C works from the start."""

import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

__all__ = ["CtrlC", "Stopped", "ignore_ctrl_c", "main", "stopped_in_one_line"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: the words after "linrec"; None takes `sys.argv[1:]`.

    Returns:
        The exit status: 0 for success, 2 for a user error, 1 for a failed run, 130 for an interrupted run.

    Example:
        >>> main(["--version"])
        0.1.0
        0
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    with stopped_in_one_line():
        dispatch = importlib.import_module("linrec.cli.dispatch")
    try:
        # after the command, the process ends: Ctrl-C would only interrupt its cleanup
        with _on_ctrl_c(CtrlC(), after=signal.SIG_IGN if arguments is None else None):
            status: int = dispatch.run(words)
        sys.stdout.flush()
    except BrokenPipeError:
        # the reader of the output has exited, as `head` does; the interpreter flushes again and must not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


class Stopped(KeyboardInterrupt):
    """Ctrl-C during a command.

    If a plain KeyboardInterrupt passes through `exec`, a program that `python -m` started ends by SIGINT and
    not by its exit status, even if it catches the exception. Imports of dataclasses call `exec`.
    """


def stopped_in_one_line() -> contextlib.AbstractContextManager[None]:
    """Let Ctrl-C end the process at once, because half-imported modules turn it into other errors."""
    return _on_ctrl_c(_end)


def _end(number: int, frame: FrameType | None) -> None:
    if sys.stdout is not None and sys.stdout.isatty():
        # the display of progress hides the cursor
        os.write(sys.stdout.fileno(), b"\x1b[?25h")
    # of several processes, the first speaks
    if os.environ.get("RANK", "0") == "0":
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, b"linrec: stopped.\n")
    os._exit(130)


class CtrlC:
    """The handler of Ctrl-C during a command: the first raises `Stopped`, the second ends the process.

    Attributes:
        again: whether the next Ctrl-C is the second. It does not wait for the cleanup after the first, and
            does not raise an error in the middle of a compilation, which may turn it into others.
    """

    def __init__(self) -> None:
        self.again = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        if self.again:
            _end(number, frame)
        self.again = True
        raise Stopped


def ignore_ctrl_c() -> None:
    """Ignore Ctrl-C while the command ends, unless another program has chosen its own handler."""
    if isinstance(signal.getsignal(signal.SIGINT), CtrlC):
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextlib.contextmanager
def _on_ctrl_c(
    handler: Callable[[int, FrameType | None], None], *, after: signal.Handlers | None = None
) -> Iterator[None]:
    """Call `handler` on Ctrl-C within the context, unless another program has chosen its own handler.

    Args:
        handler: the handler within the context.
        after: the handler after the context; None is the handler before it.
    """
    before = signal.getsignal(signal.SIGINT)
    ours = before is signal.default_int_handler or isinstance(before, CtrlC)
    if not ours or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before if after is None else after)
