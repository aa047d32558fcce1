"""Until all operators are on `core`."""

from typing import Any

from torch import Tensor

from linrec.ops.core.precision import REAL as REAL
from linrec.ops.core.precision import accumulation as accumulation
from linrec.ops.core.precision import real_dtype as real_dtype
from linrec.ops.core.precision import wide
from linrec.ops.core.precision import without_autocast as without_autocast


def widened(*tensors: Tensor | None) -> list[Any]:
    """Return the tensors in their accumulation dtypes; None stays None."""
    return [wide(x) for x in tensors]
