"""Checks that the values of JSON files, which others may have written, have the types of their fields."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union

from typing_extensions import get_type_hints, is_typeddict

from linrec.errors import RunFolderError, printable
from linrec.files import read_json, reason
from linrec.rules import check_integers

__all__ = ["check_content", "check_types", "read_content"]

WORDS = {
    int: "an integer",
    float: "a number",
    str: "a text without control characters",
    bool: "true or false",
    type(None): "null",
}


def read_content(path: Path, kind: type, cure: str = "") -> dict[str, Any] | None:
    """Return the content of a JSON file of a run folder, None without the file; see `check_content`."""
    if not path.exists():
        return None
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path} cannot be used: {reason(error)}. {cure}".rstrip()) from error
    return check_content(path, content, kind, cure)


def check_content(path: Path, content: Any, kind: type, cure: str = "") -> dict[str, Any]:
    """Return the content of a JSON file if it is an object of the right fields.

    Args:
        path: the file, for messages.
        content: the content.
        kind: a `TypedDict`: its fields have the types of their hints, and its required fields are there.
            Other fields may have any value.
        cure: a sentence for the error.
    """
    try:
        if not isinstance(content, dict):
            raise TypeError("it is not a JSON object.")
        check_integers(content)
        _check_object(content, kind, "")
    except (TypeError, ValueError) as error:
        raise RunFolderError(f"{path} cannot be used: {error} {cure}".rstrip()) from error
    return content


def check_types(hints: Mapping[str, Any], values: Mapping[str, Any], section: str = "") -> None:
    """Check that values match the type hints of their fields.

    Args:
        hints: type hints by field name. Types that JSON cannot hold are not checked.
        values: values by field name, with tuples for lists. Names without a type hint are not checked.
        section: prefix of the field names in messages.
    """
    for name, value in values.items():
        if name in hints:
            _check(value, hints[name], f"{section}{name}")


def _check(value: Any, hint: Any, name: str) -> None:
    """Check a value, and the values inside of it, so that a message names the innermost field."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) in (Union, types.UnionType) and value is not None:
        inner = [argument for argument in arguments if argument is not type(None)]
        if len(inner) == 1 and _fits(value, _outer(inner[0])):
            return _check(value, inner[0], name)
    if not _fits(value, _outer(hint)):
        got = repr(value)
        got = got if len(got) <= 80 else f"{got[:80]}..."
        raise TypeError(f"`{name}` must be {_described(hint)}; got {got}.")
    if dataclasses.is_dataclass(hint) or is_typeddict(hint):
        _check_object(value, hint, f"{name}.")
    elif typing.get_origin(hint) is list:
        for item in value:
            _check(item, arguments[0], name)
    elif typing.get_origin(hint) is dict:
        for key, item in value.items():
            _check(item, arguments[1], f"{name}.{key}")


def _check_object(value: dict[str, Any], kind: Any, section: str) -> None:
    hints = get_type_hints(kind)
    for name in hints:
        if name in getattr(kind, "__required_keys__", ()) and name not in value:
            raise TypeError(f"it has no {section + name!r}.")
    check_types(hints, value, section)


def _outer(hint: Any) -> Any:
    """Return the hint without the types of the values inside."""
    origin = typing.get_origin(hint)
    return origin if origin in (list, dict) else dict if is_typeddict(hint) else hint


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
    if hint is dict or origin is dict or dataclasses.is_dataclass(hint) or is_typeddict(hint):
        return isinstance(value, dict)
    if hint is list or origin is list:
        return isinstance(value, list)
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
    if origin is list:
        return f"a list ({_described(arguments[0])})"
    if hint is dict or origin is dict or dataclasses.is_dataclass(hint) or is_typeddict(hint):
        return "an object"
    return WORDS.get(str if hint is Path else hint, str(hint))
