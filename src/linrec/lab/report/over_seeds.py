"""Mean and spread of a number over seeds, and their text."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple


class MeanAndSpread(NamedTuple):
    """The mean of a number over seeds, and its spread.

    Args:
        mean: arithmetic mean.
        spread: standard deviation of a sample, with n - 1; None of a single seed.
    """

    mean: float
    spread: float | None


def mean_and_spread(values: Sequence[float]) -> MeanAndSpread:
    """Return mean and standard deviation of at least one value.

    Example:
        >>> mean_and_spread([0.25, 0.75]).mean, mean_and_spread([0.5])
        (0.5, MeanAndSpread(mean=0.5, spread=None))
    """
    if not all(map(math.isfinite, values)):
        # `fmean` and `stdev` raise for some of these
        return MeanAndSpread(sum(values) / len(values), None if len(values) == 1 else math.nan)
    return MeanAndSpread(statistics.fmean(values), None if len(values) == 1 else statistics.stdev(values))


def format_mean_and_spread(
    values: Sequence[float], mean_format: str = ",.3f", spread_format: str | None = None
) -> str:
    """Return "mean ± standard deviation", "mean (1 seed)" for a single value, a dash for no value.

    Args:
        values: a value per seed.
        mean_format: how the mean is formatted.
        spread_format: how the standard deviation is formatted; None is `mean_format`.

    Example:
        >>> format_mean_and_spread([0.42, 0.43, 0.44]), format_mean_and_spread([0.5], ".1f")
        ('0.430 ± 0.010', '0.5 (1 seed)')
        >>> format_mean_and_spread([])
        '–'
    """
    if not values:
        return "–"
    mean, spread = mean_and_spread(values)
    written = format(mean, mean_format)
    if spread is None:
        return f"{written} (1 seed)"
    return f"{written} ± {format(spread, spread_format or mean_format)}"
