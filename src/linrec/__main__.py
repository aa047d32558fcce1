"""Run the command `linrec` as `python -m linrec`; torchrun starts it this way."""

import sys

from linrec.cli.main import main

sys.exit(main())
