"""Errors that name the cure: the nearest match of an unknown name, and everything that exists."""

import difflib
from collections.abc import Iterable


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return the choice that is spelt most like `name`, letter case, hyphens and underscores aside.

    Args:
        name: what was asked for.
        choices: what exists; at least one name.

    Returns:
        The closest choice; the first of several that are equally close.

    Raises:
        ValueError: there are no choices.

    Example:
        >>> nearest("Gate-Lop", ["attention", "gate_loop"])
        'gate_loop'
    """
    ordered = list(choices)
    if not ordered:
        raise ValueError(f"`choices` must hold at least one name to compare {name!r} with; got none.")

    def likeness(choice: str) -> float:
        return difflib.SequenceMatcher(None, _folded(name), _folded(choice)).ratio()

    return max(ordered, key=likeness)


def unknown(kind: str, name: object, choices: Iterable[str]) -> ValueError:
    """Return (not raise) the error for a name that does not exist.

    Args:
        kind: what the name was meant to be, in the singular: "mixer", "mode", "recipe".
        name: what was asked for.
        choices: what exists.

    Returns:
        A ValueError that gives the nearest match and lists all choices.

    Example:
        >>> print(unknown("mixer", "gateloop", ["attention", "gate_loop"]))
        there is no mixer 'gateloop'; did you mean 'gate_loop'? Choose from: 'attention', 'gate_loop'.
    """
    ordered = list(choices)
    if not ordered:
        return ValueError(f"there is no {kind} {name!r}, and none to choose from.")
    listed = ", ".join(repr(choice) for choice in ordered)
    return ValueError(
        f"there is no {kind} {name!r}; did you mean {nearest(str(name), ordered)!r}? Choose from: {listed}."
    )


def _folded(name: str) -> str:
    return name.lower().replace("-", "_")
