"""Names that users type: modules found by file name, and errors that name the nearest match."""

import difflib
import pkgutil
from collections.abc import Iterable
from types import ModuleType

__all__ = ["module_names", "unknown_name"]


def module_names(package: ModuleType, *, exclude: Iterable[str] = ()) -> list[str]:
    """Names of the modules in `package`, sorted, without those in `exclude` and those that start with `_`.

    Args:
        package: an imported package; its submodules are listed, not imported.
        exclude: names of modules that hold no named thing, such as the abstract base.

    Example:
        >>> from linrec import mixers
        >>> "gate_loop" in module_names(mixers, exclude=["base"])
        True
    """
    found = (module.name for module in pkgutil.iter_modules(package.__path__))
    return sorted(name for name in found if not name.startswith("_") and name not in set(exclude))


def unknown_name(kind: str, name: str, known: Iterable[str]) -> ValueError:
    """The error for a `name` that is not among `known`, with the nearest match and all that exist.

    Args:
        kind: what is named, as it reads in the message, such as "mixer" or "`magnitude_activation`".
        name: what the user gave.
        known: what exists.

    Returns:
        A ValueError for the caller to raise.

    Example:
        >>> print(unknown_name("mixer", "gateloop", ["gate_loop", "lru"]))
        unknown mixer 'gateloop'; did you mean 'gate_loop'? There are: 'gate_loop', 'lru'.
    """
    known = list(known)
    nearest = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return ValueError(f"unknown {kind} {name!r}; {hint}There are: {', '.join(map(repr, known))}.")
