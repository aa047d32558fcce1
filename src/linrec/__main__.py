"""`python -m linrec` is `linrec`, as torchrun starts it."""

import sys

from linrec.cli.main import main

sys.exit(main())
