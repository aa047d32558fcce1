"""`python -m linrec.cli` is `linrec`."""

import sys

from linrec.cli.main import main

sys.exit(main())
