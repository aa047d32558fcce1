"""The command line: `linrec COMMAND ...`; one file per command, each with a function `run`.

What the user got wrong is answered in one line on standard error, with exit status 2; a run that could not go
on ends with status 1, one that was stopped with 130. A traceback is a bug of linrec.
"""

from linrec.cli.main import main

__all__ = ["main"]
