"""Patterns: names of what the layers have, tiled over depth."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from linrec.errors import unknown

__all__ = ["arguments_by_name", "settled", "spelled"]


def settled(field: str, names: str | Sequence[str], n_layers: int) -> str | tuple[str, ...]:
    """Return a name that all layers have, or a pattern of two names and more as a tuple of canonical ones.

    Args:
        field: what the pattern is called, for errors.
        names: a name, or names of layers, first layer first, that are repeated until all layers have one.
        n_layers: how many layers there are.

    Raises:
        ValueError: no names, or more than layers.
        TypeError: names that are no strings.

    Example:
        >>> settled("mixer", ["gate-loop", "attention"], n_layers=4)
        ('gate_loop', 'attention')
        >>> settled("mixer", ("gla",), n_layers=4)
        'gla'
    """
    if isinstance(names, str):
        return names
    # JSON has lists alone
    pattern = tuple(names)
    for name in pattern:
        if not isinstance(name, str):
            raise TypeError(
                f"`{field}` must be a name or a tuple of names; got {name!r} in {pattern}. Pass strings."
            )
    if not 1 <= len(pattern) <= n_layers:
        raise ValueError(
            f"`{field}` must be a pattern of 1 to {n_layers} names, as `n_layers` = {n_layers} is; got "
            f"{len(pattern)}. Pass a shorter pattern, or as many layers as it has names."
        )
    folded = tuple(name.replace("-", "_") for name in pattern)
    return folded if len(folded) > 1 else folded[0]


def spelled(pattern: Sequence[str]) -> str:
    """Return a pattern as it is typed, three and more of the same name in a row by their number.

    Example:
        >>> spelled(("gla", "gla", "attention")), spelled(("mlstm",) * 7 + ("slstm",))
        ('gla gla attention', '7 x mlstm slstm')
    """
    runs = [(name, len(list(run))) for name, run in itertools.groupby(pattern)]
    return " ".join(f"{n} x {name}" if n > 2 else " ".join([name] * n) for name, n in runs)


def arguments_by_name(pattern: Sequence[str], given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the arguments of a pattern's mixers by canonical names.

    Args:
        pattern: canonical names of mixers.
        given: by the name of a mixer, its keyword arguments.

    Raises:
        ValueError: arguments that are not under the name of a mixer, or of one that the pattern has not.

    Example:
        >>> arguments_by_name(("gate_loop", "attention"), {"gate-loop": {"n_heads": 2}})
        {'gate_loop': {'n_heads': 2}}
    """
    names, found = list(dict.fromkeys(pattern)), {}
    for name, arguments in given.items():
        if not isinstance(arguments, Mapping):
            raise ValueError(
                f"`mixer_args` must have the arguments of each mixer of {tuple(pattern)} under its name; got "
                f"{name!r}. Pass {{{names[-1]!r}: {{{name!r}: {arguments!r}}}}}, say."
            )
        mixer = name.replace("-", "_")
        if mixer not in names:
            raise unknown(f"mixer of {tuple(pattern)} to take the `mixer_args` of", name, names)
        found[mixer] = dict(arguments)
    return found
