"""The two tiers of the tests.

`make test` runs every law once for each mixer and operator, where it can break. `make test-all` also runs
the cases marked `thorough`: further variants, dtypes and lengths, and most tests that compile, export, start
processes, make pages or run the models of other libraries, since each takes a second or more.
"""

from collections.abc import Iterable
from typing import Any

import pytest

thorough = pytest.mark.thorough


def tiered(fast: Iterable[Any], further: Iterable[Any]) -> list[Any]:
    """Return parameters of a test: the cases of the first tier, and further ones marked thorough.

    Args:
        fast: values of one parameter, or tuples of the values of several.
        further: likewise; what is in `fast` too counts as fast.

    Example:
        >>> [(*case.values, bool(case.marks)) for case in tiered([65], [1, 64, 65])]
        [(65, False), (1, True), (64, True)]
    """
    fast = list(fast)
    slow = [case for case in further if case not in fast]
    return [_parameter(case) for case in fast] + [_parameter(case, thorough) for case in slow]


def _parameter(case: Any, *marks: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks)
