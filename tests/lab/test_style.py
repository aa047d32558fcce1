"""Mean and spread over seeds, as numbers and as text."""

import math

import pytest

from linrec.lab.style import format_mean_and_spread, mean_and_spread


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([], "–"),
        ([0.25], "0.250 (1 seed)"),
        ([0.1, 0.3], "0.200 ± 0.141"),
        ([0.43, 0.43, 0.43], "0.430 ± 0.000"),
    ],
)
def test_format_mean_and_spread(values, text):
    assert format_mean_and_spread(values) == text


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_spread_of_what_is_not_finite_is_not_a_number(value):
    mean, spread = mean_and_spread([value, 1.0])
    assert not math.isfinite(mean) and math.isnan(spread)
