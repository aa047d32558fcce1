"""Checks of arguments, each one line at the start of a class or a function.

A check takes its arguments by keyword, so that the error can name them:

    choice(Compression, compression=kind)
    at_least(1, gate_rank=gate_rank, cure="The paper's is 16.")

`Mixer` checks the arguments of a mixer by their annotations with `typed`, before its `__init__` runs.

With `or_none=True` None passes too, for arguments whose default is None.
"""

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from types import NoneType, UnionType
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin

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
    "typed",
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
    """
    for name, value in given.items():
        if value is None and or_none:
            continue
        pair = isinstance(value, (tuple, list)) and len(value) == 2
        if not pair or not low < value[0] <= value[1] < high:
            bound = "" if high == math.inf else f" < {high}"
            raise _error(name, f"(low, high) with {low} < low <= high{bound}", value, cure)


def require(condition: bool, message: str) -> None:
    """Raise ValueError with the message unless the condition of arguments that depend on each other holds."""
    if not condition:
        raise ValueError(message)


def check_numbers(values: Mapping[str, Any]) -> None:
    """Raise ValueError unless all integers fit into 64 bits, and all finite numbers into float32.

    Args:
        values: nested dictionaries, lists and tuples of any values.
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
    """Yield the dotted name and the value of every leaf of nested dictionaries, lists and tuples."""
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


def typed(hints: Mapping[str, Any], **given: object) -> None:
    """Raise unless every argument has the type of its annotation: bools are no numbers, nor is NaN.

    Args:
        hints: annotations by name: bool, int, float, str, dict, a `Literal`, tuples and unions of them.
            Arguments of other annotations pass.
        given: the arguments by name.
    """
    for name, value in given.items():
        if name not in hints or _has_type(value, hints[name]):
            continue
        options = _options(hints[name])
        for text in value if isinstance(value, tuple) else (value,):
            if options and isinstance(text, str):
                choice(options, **{name: text})
        error = ValueError if isinstance(value, float) and not math.isfinite(value) else TypeError
        raise error(f"`{name}` must be {_described(hints[name])}; got {' '.join(repr(value).split()):.80}.")


_TYPES: dict[Any, tuple[tuple[type, ...], str]] = {
    int: ((int,), "an integer"),
    float: ((int, float), "a finite number"),
    bool: ((bool,), "True or False"),
    str: ((str,), "a string"),
    dict: ((Mapping,), "a dictionary"),
    Sequence: ((Sequence,), "a tuple"),
    NoneType: ((NoneType,), "None"),
}


def _has_type(value: Any, hint: Any, largest: float = sys.float_info.max) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_has_type(value, argument, largest) for argument in arguments)
    if origin is Literal:
        return any(value == option and type(value) is type(option) for option in arguments)
    if origin is tuple and ... not in arguments:
        fits = isinstance(value, (tuple, list)) and len(value) == len(arguments)
        # a range may have an end that does not limit
        return fits and all(map(_has_type, value, arguments, repeat(math.inf)))
    kind = origin or hint
    if not isinstance(kind, type) or kind not in _TYPES:
        return True
    if kind not in (int, float):
        return isinstance(value, _TYPES[kind][0])
    # a bool is an int, and NaN is in no range
    number = isinstance(value, _TYPES[kind][0]) and not isinstance(value, bool)
    return number and -largest <= value <= largest


def _options(hint: Any) -> list[Any]:
    """Return the names that an annotation allows; none if it allows any text."""
    if get_origin(hint) is Literal:
        return [option for option in get_args(hint) if isinstance(option, str)]
    found = [_options(part) for part in get_args(hint)]
    return [] if str in get_args(hint) else [option for part in found for option in part]


def _described(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(map(_described, arguments))
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if origin is tuple:
        return f"({', '.join(map(_described, arguments))})"
    return _TYPES[origin or hint][1]


def _numbers(given: Mapping[str, Any], or_none: bool) -> Iterator[tuple[str, Any]]:
    """Yield the arguments to check; raise TypeError for what cannot be compared with a number."""
    for name, value in given.items():
        if isinstance(value, (bool, str, list, tuple, dict)):
            raise TypeError(f"`{name}` must be a number; got {value!r:.80}.")
        if not (or_none and value is None):
            yield name, value


def _error(name: str, expected: str, value: object, cure: str) -> ValueError:
    return ValueError(f"`{name}` must be {expected}; got {value}. {cure}".rstrip())
