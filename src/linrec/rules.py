"""Checks of arguments, each one line at the start of a class or a function.

A check takes its arguments by keyword, so that the error can name them:

    choice(ForgetGate, forget_gate=forget_gate)
    at_least(1, gate_rank=gate_rank, cure="The paper's is 16.")

With `or_none=True` None passes too, for arguments whose default is None.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias, get_args

from linrec.errors import unknown

__all__ = [
    "COUNT",
    "at_least",
    "check_integers",
    "check_numbers",
    "choice",
    "divisor",
    "named_values",
    "positive",
    "require",
    "span",
]

COUNT = 10_000
"""The largest number of layers, or of other parts that a model makes or runs one after another."""
DEPTH = 32
"""The levels of objects and lists that a configuration may have."""
LARGEST = 3.4028234663852886e38
"""The largest finite float32 number."""

# a run-time checker of annotations does not accept an int as a float
Number: TypeAlias = int | float


def choice(options: Any, **given: object) -> None:
    """Raise ValueError unless every argument is among the options.

    Args:
        options: a `Literal`, or the names themselves.
        given: the arguments by name.

    Raises:
        ValueError: an unknown name; the message gives the nearest option and lists all.

    Example:
        >>> choice(["rms", "layer"], norm="rms")
    """
    names: Iterable[Any] = get_args(options) or options
    for name, value in given.items():
        if value not in names:
            raise unknown(f"`{name}`", value, names)


def at_least(
    least: Number, *, most: Number = math.inf, cure: str = "", or_none: bool = False, **given: Any
) -> None:
    """Raise ValueError unless every argument is finite, at least `least` and at most `most`.

    Args:
        least: the smallest allowed number.
        most: the largest allowed number. A configuration may be a file of others, so sizes and numbers of
            parts have a limit that is checked before the first part is made.
        cure: a sentence for the error, such as the paper's value.
        or_none: whether None is allowed.
        given: the arguments by name.

    Raises:
        ValueError: an argument is smaller, larger, infinite or NaN.

    Example:
        >>> at_least(1, d_state=16, rank=None, or_none=True)
    """
    for name, value in _numbers(given, or_none):
        if value is None or not least <= value <= most or value == math.inf:
            expected = f"at least {least}"
            if value is not None and value > most:
                expected += f" and at most {most:,}"
            elif value == math.inf:
                expected += " and finite"
            raise _error(name, expected, value, cure)


def positive(*, cure: str = "", or_none: bool = False, **given: Any) -> None:
    """Raise ValueError unless every argument is positive and finite.

    Args:
        cure: a sentence for the error.
        or_none: whether None is allowed.
        given: the arguments by name.

    Raises:
        ValueError: an argument is not positive, infinite or NaN.

    Example:
        >>> positive(tau=16.0)
    """
    for name, value in _numbers(given, or_none):
        if value is None or not 0 < value < math.inf:
            raise _error(name, "positive and finite", value, cure)


def divisor(of: str, number: int, *, cure: str = "", or_none: bool = False, **given: Any) -> None:
    """Raise ValueError unless every argument is a positive divisor of a number.

    Args:
        of: the name of the number, or a description of it, for the error.
        number: the number.
        cure: a sentence for the error.
        or_none: whether None is allowed.
        given: the arguments by name.

    Raises:
        ValueError: an argument is below 1 or leaves a remainder.

    Example:
        >>> divisor("n_heads", 8, kv_heads=2)
    """
    of = f"`{of}`" if of.isidentifier() else of
    for name, value in _numbers(given, or_none):
        if value is None or value < 1 or number % value:
            raise _error(name, f"a positive divisor of {of} = {number}", value, cure)


def span(low: Number, high: Number, *, cure: str = "", or_none: bool = False, **given: Any) -> None:
    """Raise ValueError unless every argument is a range (a, b) with low < a <= b < high.

    Args:
        low: exclusive lower bound of `a`.
        high: exclusive upper bound of `b`.
        cure: a sentence for the error.
        or_none: whether None is allowed.
        given: the arguments by name.

    Raises:
        ValueError: an argument is out of order or out of bounds.

    Example:
        >>> span(0, 1, a_init=(0.9, 0.999))
    """
    for name, value in _numbers(given, or_none):
        if value is None or not low < value[0] <= value[1] < high:
            bound = "" if high == math.inf else f" < {high}"
            raise _error(name, f"(low, high) with {low} < low <= high{bound}", value, cure)


def require(condition: bool, message: str) -> None:
    """Raise ValueError with the message unless the condition holds; for arguments that depend on each other.

    Example:
        >>> require(True, "`quadratic` and `linear` must not both be False: no step would see another.")
    """
    if not condition:
        raise ValueError(message)


def check_numbers(values: Mapping[str, Any]) -> None:
    """Raise ValueError unless all integers fit into 64 bits, and all finite numbers into float32.

    Args:
        values: nested dictionaries, lists and tuples of any values.

    Raises:
        ValueError: a number is too large or NaN, or the values are nested too deeply.

    Example:
        >>> check_numbers({"optim": {"lr": 0.1, "betas": (0.9, 0.95)}})
    """
    check_integers(values)
    for name, number in named_values(values):
        if isinstance(number, float) and math.isnan(number):
            raise ValueError(f"`{name}` must be a number; got nan.")
        # mixers have infinite limits that do not limit
        if isinstance(number, float) and LARGEST < abs(number) < math.inf:
            raise ValueError(
                f"`{name}` must be at most {LARGEST:.4g} in magnitude, to fit into float32; got {number}."
            )


def check_integers(values: Mapping[str, Any]) -> None:
    """Raise ValueError unless all integers of nested dictionaries, lists and tuples fit into 64 bits."""
    for name, number in named_values(values):
        if isinstance(number, int) and number.bit_length() > 63:
            raise ValueError(
                f"`{name}` must be an integer of 64 bits, at most {2**63 - 1:,}; got "
                f"{number.bit_length() + 1} bits."
            )


def named_values(values: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of every leaf of nested dictionaries, lists and tuples.

    Raises:
        ValueError: the values are nested too deeply.

    Example:
        >>> [*named_values({"optim": {"lr": 0.1, "betas": (0.9, 0.95)}})]
        [('optim.lr', 0.1), ('optim.betas', 0.9), ('optim.betas', 0.95)]
    """
    if depth > DEPTH:
        raise ValueError(f"`{name}` must be nested at most {DEPTH} levels deep; got more levels.")
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from named_values(value, f"{name}.{key}" if name else str(key), depth + 1)
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from named_values(value, name, depth + 1)
    else:
        yield name, values


def _numbers(given: Mapping[str, Any], or_none: bool) -> Iterator[tuple[str, Any]]:
    """Yield the arguments to check."""
    return ((name, value) for name, value in given.items() if not (or_none and value is None))


def _error(name: str, expected: str, value: object, cure: str) -> ValueError:
    return ValueError(f"`{name}` must be {expected}; got {value}. {cure}".rstrip())
