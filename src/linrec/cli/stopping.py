"""Ctrl-C during a command: one line, and the exit status 130. Free of slow imports, as `main` is."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

__all__ = ["CtrlC", "Stopped", "ignore_ctrl_c", "on_ctrl_c", "stopped_in_one_line"]


class Stopped(KeyboardInterrupt):
    """Ctrl-C during a command.

    If a plain KeyboardInterrupt passes through `exec`, a program that `python -m` started ends by SIGINT and
    not by its exit status, even if it catches the exception. Imports of dataclasses call `exec`.
    """


def stopped_in_one_line() -> contextlib.AbstractContextManager[None]:
    """Let Ctrl-C end the process at once, because half-imported modules turn it into other errors."""
    return on_ctrl_c(_end)


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
def on_ctrl_c(
    handler: Callable[[int, FrameType | None], None], *, after: signal.Handlers | None = None
) -> Iterator[None]:
    """Call `handler` on Ctrl-C within the context, unless another program has chosen its own handler.

    `after` is the handler after the context; None is the handler before it.
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
