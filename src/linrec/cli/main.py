"""The start of every command, before the second in which its modules are imported."""

import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType

__all__ = ["main", "stopped_in_one_line"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: the words after "linrec"; None takes those of the process.

    Returns:
        The exit status: 0; 2 for what the user got wrong, 1 for a run that failed, 130 for one stopped.

    Example:
        >>> main(["--version"])
        0.1.0
        0
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    with stopped_in_one_line():
        dispatch = importlib.import_module("linrec.cli.dispatch")
    try:
        status: int = dispatch.run(words)
        sys.stdout.flush()
    except BrokenPipeError:
        # whoever read our output has left, as `head` does; the interpreter flushes again, and must not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


@contextlib.contextmanager
def stopped_in_one_line() -> Iterator[None]:
    """Let Ctrl-C end the process at once: modules that are half imported turn it into other errors."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not ours or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, b"linrec: stopped.\n")
        os._exit(130)

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
