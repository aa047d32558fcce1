"""Rules that arguments obey, each one line where a class or a function begins.

A rule names its arguments by keyword, so that an error can name them too:

    choice(ForgetGate, forget_gate=forget_gate)
    at_least(1, gate_rank=gate_rank, cure="The paper's is 16.")

None passes every rule but `choice`: it is the default of arguments that may be left out.
"""

import math
from collections.abc import Iterable
from typing import Any, TypeAlias, get_args

from linrec.errors import unknown

__all__ = ["at_least", "choice", "divisor", "positive", "require", "span"]

# a checker of annotations at run time does not take an int for a float
Number: TypeAlias = int | float


def choice(options: Any, **given: object) -> None:
    """Raise ValueError unless every argument is one of the options.

    Args:
        options: a `Literal`, or the names themselves.
        given: the arguments by name.

    Raises:
        ValueError: an unknown name; the message gives the nearest one and lists all.

    Example:
        >>> choice(["rms", "layer"], norm="rms")
    """
    names: Iterable[Any] = get_args(options) or options
    for name, value in given.items():
        if value not in names:
            raise unknown(f"`{name}`", value, names)


def at_least(least: Number, *, cure: str = "", **given: Number | None) -> None:
    """Raise ValueError unless every argument is at least this, and finite.

    Args:
        least: the smallest number that is allowed.
        cure: a sentence for the error, such as the paper's value.
        given: the arguments by name.

    Raises:
        ValueError: an argument is smaller, infinite or NaN.

    Example:
        >>> at_least(1, d_state=16, rank=None)
    """
    for name, value in given.items():
        if value is not None and not least <= value < math.inf:
            finite = " and finite" if value == math.inf else ""
            raise ValueError(_message(f"`{name}` must be at least {least}{finite}; got {value}.", cure))


def positive(*, cure: str = "", **given: Number | None) -> None:
    """Raise ValueError unless every argument is above zero and finite.

    Args:
        cure: a sentence for the error.
        given: the arguments by name.

    Raises:
        ValueError: an argument is not positive, infinite or NaN.

    Example:
        >>> positive(tau=16.0)
    """
    for name, value in given.items():
        if value is not None and not 0 < value < math.inf:
            raise ValueError(_message(f"`{name}` must be positive and finite; got {value}.", cure))


def divisor(of: str, number: int, *, cure: str = "", **given: int | None) -> None:
    """Raise ValueError unless every argument is a positive divisor of a number.

    Args:
        of: the name of the number, or words for it, for the error.
        number: the number.
        cure: a sentence for the error.
        given: the arguments by name.

    Raises:
        ValueError: an argument is below 1 or leaves a remainder.

    Example:
        >>> divisor("n_heads", 8, kv_heads=2)
    """
    of = f"`{of}`" if of.isidentifier() else of
    for name, value in given.items():
        if value is not None and (value < 1 or number % value):
            raise ValueError(
                _message(f"`{name}` must be a positive divisor of {of} = {number}; got {value}.", cure)
            )


def span(low: Number, high: Number, *, cure: str = "", **given: tuple[Number, Number] | None) -> None:
    """Raise ValueError unless every argument is a range (a, b) with low < a <= b < high.

    Args:
        low: what `a` must exceed.
        high: what `b` must stay below.
        cure: a sentence for the error.
        given: the arguments by name.

    Raises:
        ValueError: an argument is out of order or out of bounds.

    Example:
        >>> span(0, 1, a_init=(0.9, 0.999))
    """
    for name, value in given.items():
        if value is not None and not low < value[0] <= value[1] < high:
            bound = "" if high == math.inf else f" < {high}"
            expected = f"(low, high) with {low} < low <= high{bound}"
            raise ValueError(_message(f"`{name}` must be {expected}; got {tuple(value)}.", cure))


def require(condition: bool, message: str) -> None:
    """Raise ValueError with the message unless the condition holds, for arguments that depend on each other.

    Example:
        >>> require(True, "`quadratic` and `linear` must not both be False: no step would see another.")
    """
    if not condition:
        raise ValueError(message)


def _message(text: str, cure: str) -> str:
    return f"{text} {cure}" if cure else text
