"""The command line: `linrec COMMAND ...`; one file per command, each with a function `run`.

A user error prints a single line on standard error and exits with status 2. A run that fails exits with
status 1, an interrupted run with status 130. A traceback is a bug of linrec.
"""

from linrec.cli.main import main

__all__ = ["main"]
