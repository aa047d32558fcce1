"""Mixers as users type them: a name or an import path, with arguments, or a pattern of mixers over depth."""

import ast
import hashlib
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from linrec.errors import unknown, unknown_argument
from linrec.mixers import canonical
from linrec.models import MemoryConfig
from linrec.models.config import mixer_parameters

__all__ = ["Variant", "parse_variant", "split_list"]

LONGEST = 80
"""Maximum number of a label's characters in the name of its folder."""


@dataclass(frozen=True)
class Variant:
    """A mixer with its arguments, or a pattern of mixers over depth, and a memory across the stack.

    Args:
        mixer: value of `ModelConfig.mixer`.
        mixer_args: value of `ModelConfig.mixer_args`, with the explicit arguments only.
        label: normalised text of the variant; `parse_variant` reads it.
        memory: value of `ModelConfig.memory`; None leaves it as the task's recipe has it.
    """

    mixer: str | tuple[str, ...]
    mixer_args: Mapping[str, Any]
    label: str
    memory: MemoryConfig | None = None


def parse_variant(text: str) -> Variant:
    """Parse a mixer as users type it: NAME or NAME(argument=value, ...), or several of these joined by "+".

    Args:
        text: the mixer. Names are names of `linrec.mixers.get`; values are Python literals, which are parsed
            and never evaluated. A text with plus signs is a pattern that repeats over the layers; a mixer
            that occurs twice in the pattern must have the same arguments both times. After "@" stands a
            memory across the stack: a kind of `MemoryConfig` with its arguments.

    Raises:
        ValueError: the text has another form; the mixer or an argument does not exist, and the message gives
            the nearest name; or a value has a type that a configuration cannot hold.

    Example:
        >>> parse_variant("gate-loop(n_heads = 2, d_v=8)").label
        'gate_loop(n_heads=2, d_v=8)'
        >>> parse_variant("gla+attention(window=16)").mixer_args
        {'attention': {'window': 16}}
        >>> parse_variant("attention@recurrent_memory(n_tokens=4)").memory.n_tokens
        4
    """
    stack, *memories = _split(text, "@")
    if memories:
        found = parse_variant(stack)
        kind, arguments = _part("@".join(memories), text, "memory")
        memory = MemoryConfig(kind=kind, **arguments)  # type: ignore[arg-type]
        return Variant(found.mixer, found.mixer_args, f"{found.label}@{_written(kind, arguments)}", memory)
    parts = [_part(part, text) for part in _split(text, "+")]
    label = "+".join(_written(name, arguments) for name, arguments in parts)
    by_name: dict[str, dict[str, Any]] = {}
    for name, arguments in parts:
        if by_name.setdefault(name, arguments) != arguments:
            raise ValueError(
                f"mixer {name!r} must have the same arguments at all its places in {text!r}; "
                f"got {by_name[name]} and {arguments}."
            )
    if len(parts) == 1:
        return Variant(*parts[0], label)
    given = {name: arguments for name, arguments in by_name.items() if arguments}
    return Variant(tuple(name for name, _ in parts), given, label)


def split_list(text: str) -> list[str]:
    """Split a text at commas outside brackets and quotes."""
    return [part.strip() for part in _split(text, ",") if part.strip()]


def folder_name(label: str) -> str:
    """Return a folder name that is valid on every file system and unique to the label."""
    name = re.sub(r"[^\w.-]+", "-", label).strip("-")
    if re.fullmatch(r"[\w.:-]+", label) and len(name) <= LONGEST:
        return name
    # labels that differ only in punctuation have the same name; the hash makes them unique
    digest = hashlib.sha256(label.encode()).hexdigest()[:6]
    return f"{name[:LONGEST]}-{digest}"


def short(label: str) -> str:
    """Return a label without the modules of import paths."""
    return re.sub(r"[\w.]+:(?=\w)", "", label)


def _part(part: str, text: str, what: str = "mixer") -> tuple[str, dict[str, Any]]:
    """Return the name of a mixer or a memory and its arguments, in the order of its signature."""
    name, bracket, rest = part.strip().partition("(")
    name = canonical(name.strip()) if what == "mixer" else name.strip().replace("-", "_")
    parameters = mixer_parameters(name) if what == "mixer" else _memory_parameters(name)
    try:
        call = ast.parse(f"mixer({rest if bracket else ')'}", mode="eval").body
    except SyntaxError as error:
        raise ValueError(
            f"{what} {text!r} must be NAME or NAME(argument=value, ...): {error.msg}."
        ) from error
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ValueError(f"{what} {text!r} must be NAME or NAME(argument=value, ...), and nothing after it.")
    if call.args or any(argument.arg is None for argument in call.keywords):
        raise ValueError(
            f"arguments of {what} {name!r} must be named, as in {name}(argument=value); got {text!r}. "
            f"It has {', '.join(parameters) or 'none'}."
        )
    given: dict[str, Any] = {}
    for argument in call.keywords:
        assert argument.arg is not None
        if argument.arg not in parameters:
            raise unknown_argument(f"{what} {name!r}", argument.arg, parameters)
        if argument.arg in given:
            raise ValueError(f"`{argument.arg}` of {what} {name!r} is given twice in {text!r}.")
        given[argument.arg] = _value(f"{what} {name!r}", argument)
    return name, {argument: given[argument] for argument in parameters if argument in given}


def _memory_parameters(kind: str) -> dict[str, inspect.Parameter]:
    """Return the arguments of a kind of memory."""
    kinds = [name for name in get_args(get_type_hints(MemoryConfig)["kind"]) if name != "none"]
    if kind not in kinds:
        raise unknown("memory", kind, kinds)
    parameters = inspect.signature(MemoryConfig).parameters
    mine = MemoryConfig.fields_of(kind) - {"kind"}
    return {name: parameter for name, parameter in parameters.items() if name in mine}


def _value(of: str, argument: ast.keyword) -> Any:
    try:
        return _plain(ast.literal_eval(argument.value))
    except (TypeError, ValueError):
        raise ValueError(
            f"`{argument.arg}` of {of} must be a number, a quoted string, True, False, None, or a "
            f"tuple or dictionary of these; got {ast.unparse(argument.value)}."
        ) from None


def _plain(value: Any) -> Any:
    """Convert a value to types that a configuration can hold; raise TypeError for other types."""
    if isinstance(value, list | tuple):
        return tuple(_plain(item) for item in value)
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {name: _plain(item) for name, item in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError


def _written(name: str, arguments: Mapping[str, Any]) -> str:
    listed = ", ".join(f"{argument}={value!r}" for argument, value in arguments.items())
    return f"{name}({listed})" if listed else name


def _split(text: str, separator: str) -> list[str]:
    parts, depth, quote = [""], 0, ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        else:
            depth += (sign in "([{") - (sign in ")]}")
        if sign == separator and not quote and depth <= 0:
            parts.append("")
        else:
            parts[-1] += sign
    return parts
