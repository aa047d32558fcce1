"""Until all operators are on `core`."""

from linrec.ops.core.checks import check_rates as check_rates
from linrec.ops.core.checks import check_steps as check_steps
