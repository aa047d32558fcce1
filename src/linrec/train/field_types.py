"""Checks that the values of a stored configuration have the types of their fields."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union

from linrec.errors import printable

__all__ = ["check_types"]

WORDS = {
    int: "an integer",
    float: "a number",
    str: "a text without control characters",
    bool: "true or false",
    type(None): "null",
}


def check_types(hints: Mapping[str, Any], values: Mapping[str, Any], section: str = "") -> None:
    """Check that values match the type hints of their fields.

    Args:
        hints: type hints by field name. Types that JSON cannot hold are not checked.
        values: values by field name, with tuples for lists. Names without a type hint are not checked.
        section: prefix of the field names in messages.

    Raises:
        TypeError: a value has the wrong type; the message names the field.

    Example:
        >>> check_types({"lr": float, "steps": int | None}, {"lr": 1, "steps": "many"}, "optim.")
        Traceback (most recent call last):
        TypeError: `optim.steps` must be an integer or null; got 'many'.
    """
    for name, value in values.items():
        if dataclasses.is_dataclass(hints.get(name)) and isinstance(value, dict):
            check_types(typing.get_type_hints(hints[name]), value, f"{section}{name}.")
        elif name in hints and not _fits(value, hints[name]):
            got = repr(value)
            got = got if len(got) <= 80 else f"{got[:80]}..."
            raise TypeError(f"`{section}{name}` must be {_described(hints[name])}; got {got}.")


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, argument) for argument in arguments)
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in arguments)
    if origin is tuple:
        if arguments[-1:] == (...,):
            return isinstance(value, tuple) and all(_fits(item, arguments[0]) for item in value)
        return isinstance(value, tuple) and len(value) == len(arguments) and all(map(_fits, value, arguments))
    if hint is dict or origin is dict or dataclasses.is_dataclass(hint):
        return isinstance(value, dict)
    if hint in (int, float):
        # an integer in JSON is a valid float; a bool is an int in Python, but not a number here
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    if hint in (str, Path):
        # refuse control characters, which could send commands to the terminal
        return isinstance(value, str) and printable(value) == value
    return isinstance(value, hint) if hint in (bool, type(None)) else True


def _described(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_described, arguments)))
    if origin is Literal:
        return " or ".join(repr(choice) for choice in arguments)
    if origin is tuple:
        inner = [argument for argument in dict.fromkeys(arguments) if argument is not ...]
        number = "" if ... in arguments else f" of {len(arguments)}"
        return f"a list{number} ({', '.join(map(_described, inner))})"
    if hint is dict or origin is dict or dataclasses.is_dataclass(hint):
        return "an object"
    return WORDS.get(str if hint is Path else hint, str(hint))
