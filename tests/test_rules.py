"""Each rule passes what it allows; its error names the argument, what was expected, what came, the cure."""

import math
from typing import Literal

import pytest

from linrec import rules

CURE = "The paper's is 4."
REFUSED = {
    "choice": (
        lambda: rules.choice(Literal["rms", "layer"], norm="rns"),
        "there is no `norm` 'rns'; did you mean 'rms'? Choose from: 'rms', 'layer'.",
    ),
    "choice of None": (
        lambda: rules.choice(["rms"], norm=None),
        "there is no `norm` None; did you mean 'rms'? Choose from: 'rms'.",
    ),
    "at_least": (
        lambda: rules.at_least(1, d_qk=4, rank=0, cure=CURE),
        f"`rank` must be at least 1; got 0. {CURE}",
    ),
    "at_least of NaN": (lambda: rules.at_least(1, base=math.nan), "`base` must be at least 1; got nan."),
    "at_least of infinity": (
        lambda: rules.at_least(1, base=math.inf),
        "`base` must be at least 1 and finite; got inf.",
    ),
    "positive": (lambda: rules.positive(tau=0.0), "`tau` must be positive and finite; got 0.0."),
    "positive of infinity": (
        lambda: rules.positive(tau=math.inf, cure=CURE),
        f"`tau` must be positive and finite; got inf. {CURE}",
    ),
    "divisor": (
        lambda: rules.divisor("n_heads", 6, kv_heads=4),
        "`kv_heads` must be a positive divisor of `n_heads` = 6; got 4.",
    ),
    "divisor of zero": (
        lambda: rules.divisor("n_heads", 6, kv_heads=0),
        "`kv_heads` must be a positive divisor of `n_heads` = 6; got 0.",
    ),
    "divisor of a number without a name": (
        lambda: rules.divisor("the width of the state", 6, n_blocks=4),
        "`n_blocks` must be a positive divisor of the width of the state = 6; got 4.",
    ),
    "span": (
        lambda: rules.span(0, 1, a_init=(0.9, 1.0)),
        "`a_init` must be (low, high) with 0 < low <= high < 1; got (0.9, 1.0).",
    ),
    "span in the wrong order": (
        lambda: rules.span(0, math.inf, dt=(2.0, 1.0), cure=CURE),
        f"`dt` must be (low, high) with 0 < low <= high; got (2.0, 1.0). {CURE}",
    ),
    "at_least of None": (lambda: rules.at_least(1, rank=None), "`rank` must be at least 1; got None."),
    "positive of None": (
        lambda: rules.positive(tau=None),
        "`tau` must be positive and finite; got None.",
    ),
    "span of None": (
        lambda: rules.span(0, 1, a_init=None),
        "`a_init` must be (low, high) with 0 < low <= high < 1; got None.",
    ),
    "divisor where None is allowed": (
        lambda: rules.divisor("n_heads", 6, kv_heads=4, or_none=True),
        "`kv_heads` must be a positive divisor of `n_heads` = 6; got 4.",
    ),
    "require": (lambda: rules.require(False, "`a` needs `b=True`."), "`a` needs `b=True`."),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors(name):
    broken, message = REFUSED[name]
    with pytest.raises(ValueError) as raised:
        broken()
    assert str(raised.value) == message


def test_what_is_allowed_passes():
    rules.choice(Literal["rms", "layer"], norm="layer", other="rms")
    rules.at_least(1, n=1, base=1.5, left_out=None, or_none=True)
    rules.positive(tau=1e-9, left_out=None, or_none=True)
    rules.divisor("n_heads", 6, one=1, all_of_them=6, left_out=None, or_none=True)
    rules.span(0, math.inf, dt=(0.1, 0.1), left_out=None, or_none=True)
    rules.require(True, "never seen")
