"""Patterns: tuples of names, such as names of mixers, that repeat over the layers of a stack."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from linrec.errors import unknown
from linrec.mixers import canonical

__all__ = ["arguments_by_name", "settled", "spelled"]


def settled(field: str, names: str | Sequence[str], n_layers: int) -> str | tuple[str, ...]:
    """Return the name that all layers use, or a pattern of two or more names as a tuple of canonical names.

    Args:
        field: name of the configuration field, for errors.
        names: a name, or a sequence of names, first layer first, that repeats until all layers have a name.
        n_layers: number of layers.

    Raises:
        ValueError: `names` is empty, or longer than `n_layers`.
        TypeError: a name is not a string.

    Example:
        >>> settled("mixer", ["gate-loop", "attention"], n_layers=4)
        ('gate_loop', 'attention')
        >>> settled("mixer", ("gla",), n_layers=4)
        'gla'
    """
    if isinstance(names, str):
        return names
    # JSON stores tuples as lists
    pattern = tuple(names)
    for name in pattern:
        if not isinstance(name, str):
            raise TypeError(
                f"`{field}` must be a name or a tuple of names; got {str(name)[:80]!r}. Pass strings."
            )
    if not 1 <= len(pattern) <= n_layers:
        raise ValueError(
            f"`{field}` must be a pattern of 1 to {n_layers} names, since `n_layers` = {n_layers}; got "
            f"{len(pattern)}. Pass a shorter pattern, or as many layers as the pattern has names."
        )
    folded = tuple(name.replace("-", "_") for name in pattern)
    return folded if len(folded) > 1 else folded[0]


def spelled(pattern: Sequence[str]) -> str:
    """Return a pattern as a string; three or more equal names in a row are abbreviated by their number.

    Example:
        >>> spelled(("gla", "gla", "attention")), spelled(("mlstm",) * 7 + ("slstm",))
        ('gla gla attention', '7 x mlstm slstm')
    """
    runs = [(name, len(list(run))) for name, run in itertools.groupby(pattern)]
    return " ".join(f"{n} x {name}" if n > 2 else " ".join([name] * n) for name, n in runs)


def arguments_by_name(pattern: Sequence[str], given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the keyword arguments of each mixer of a pattern, by canonical name.

    Args:
        pattern: canonical names of mixers.
        given: keyword arguments by name of the mixer.

    Raises:
        ValueError: a key of `given` is not the name of a mixer, or not of a mixer in the pattern.

    Example:
        >>> arguments_by_name(("gate_loop", "attention"), {"gate-loop": {"n_heads": 2}})
        {'gate_loop': {'n_heads': 2}}
    """
    names, found = list(dict.fromkeys(pattern)), {}
    for name, arguments in given.items():
        if not isinstance(arguments, Mapping):
            raise ValueError(
                f"`mixer_args` must have the arguments of each mixer of {tuple(pattern)} under its name; got "
                f"{name!r}. For example, pass {{{names[-1]!r}: {{{name!r}: {arguments!r}}}}}."
            )
        mixer = canonical(name)
        if mixer not in names:
            raise unknown(f"mixer of {tuple(pattern)} to take the `mixer_args` of", name, names)
        found[mixer] = dict(arguments)
    return found
