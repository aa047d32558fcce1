"""Until all operators are on `core`."""

from linrec.ops.core.checks import visible as visible
