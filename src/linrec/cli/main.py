"""The entry point of every command, kept free of slow imports so that Ctrl-C works from the start."""

import importlib
import os
import signal
import sys
from collections.abc import Sequence

from linrec.cli.stopping import CtrlC, on_ctrl_c, stopped_in_one_line

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: the words after "linrec"; None takes `sys.argv[1:]`.

    Returns:
        The exit status: 0 for success, 2 for a user error, 1 for a failed run, 130 for an interrupted run.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    with stopped_in_one_line():
        dispatch = importlib.import_module("linrec.cli.dispatch")
    try:
        # after the command, the process ends: Ctrl-C would only interrupt its cleanup
        with on_ctrl_c(CtrlC(), after=signal.SIG_IGN if arguments is None else None):
            status: int = dispatch.run(words)
        sys.stdout.flush()
    except BrokenPipeError:
        # the reader of the output has exited, as `head` does; the interpreter flushes again and must not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status
