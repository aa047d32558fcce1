"""The keyword arguments of mixers in configurations of models."""

import inspect
from collections.abc import Mapping
from typing import Any

from linrec import mixers
from linrec.errors import unknown_argument

__all__ = ["complete_mixer_args", "mixer_parameters"]


def mixer_parameters(mixer: str) -> dict[str, inspect.Parameter]:
    """Return the keyword-only arguments of a mixer, which are its configuration.

    Args:
        mixer: the mixer's name.

    Raises:
        ValueError: the mixer does not exist; the message gives the nearest match.

    Example:
        >>> "transition" in mixer_parameters("gate_loop")
        True
    """
    signature = inspect.signature(mixers.get(mixer), eval_str=True)
    return {p.name: p for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY}


def complete_mixer_args(mixer: str | tuple[str, ...], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given arguments and the mixer's defaults, in the order of the mixer's signature.

    Args:
        mixer: the mixer's name, or a pattern of names.
        given: the mixer's arguments; for a pattern, the arguments of each mixer under its name.

    Raises:
        ValueError: the mixer has no argument of a given name; the message gives the nearest match.

    Example:
        >>> complete_mixer_args(("lru", "gla"), {"lru": {"d_state": 8}})["lru"]["d_state"]
        8
    """
    if not isinstance(mixer, str):
        return {name: complete_mixer_args(name, given.get(name, {})) for name in dict.fromkeys(mixer)}
    parameters = mixer_parameters(mixer)
    for name in given:
        if name not in parameters:
            raise unknown_argument(f"mixer {mixer!r}", name, parameters)
    defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    return {
        name: given[name] if name in given else defaults[name]
        for name in parameters
        if name in {*given, *defaults}
    }
