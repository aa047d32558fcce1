"""How names become code: the files of a package, and the import paths of classes from outside of linrec."""

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["files_of", "imported"]


def files_of(paths: Iterable[str]) -> list[str]:
    """Return the names of the modules in a package, whose `__path__` is given, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(paths))


def imported(path: str, what: str, kind: str, fits: Callable[[Any], bool]) -> Any:
    """Return the class at an import path such as "my_package.my_module:MyMixer"; runs the module's code.

    Args:
        path: the import path.
        what: the kind of thing in a word, for the error: "mixer" or "task".
        kind: the class that it must be, for the error, such as "a linrec.mixers.Mixer".
        fits: whether a value of the module is such a class.
    """
    module_name, _, class_name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:
        raise ValueError(
            f"{what} {path!r} cannot be imported: {error}. Python looks for modules in the folders of "
            "PYTHONPATH and among what is installed."
        ) from error
    found = getattr(module, class_name, None)
    if not fits(found):
        own = ", ".join(name for name, value in vars(module).items() if fits(value)) or "none"
        raise ValueError(f"`{class_name}` in module {module_name} is not {kind}; the module has {own}.")
    return found
