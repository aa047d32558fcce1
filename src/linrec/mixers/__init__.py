"""Time mixers, one file per paper. The file's name is the name that users type.

A mixer is found by its file: `names` lists the files of this folder and `get` imports one, so adding a model
is adding a file. The first entry of the file's `__all__` is the mixer's class.
"""

import importlib
import inspect
import pkgutil
from typing import Any

from linrec.errors import unknown
from linrec.mixers.base import Mixer, State, Transitions

__all__ = ["Mixer", "State", "Transitions", "build", "get", "names"]


def names() -> list[str]:
    """Names of all mixers, sorted.

    Example:
        >>> "gate_loop" in names()
        True
    """
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "base")


def get(name: str) -> type[Mixer]:
    """The class of the mixer called `name`; hyphens and underscores are equal.

    Raises:
        ValueError: there is no such mixer; the message names the nearest one.

    Example:
        >>> get("gate_loop").__name__
        'GateLoop'
    """
    module_name = name.replace("-", "_")
    if module_name not in names():
        raise unknown("mixer", name, names())
    module = importlib.import_module(f"{__name__}.{module_name}")
    return getattr(module, module.__all__[0])


def build(name: str, d_model: int, **arguments: Any) -> Mixer:
    """Make the mixer called `name` of width `d_model` with its keyword arguments.

    Raises:
        ValueError: there is no such mixer, or it takes no such argument; the message names the nearest.

    Example:
        >>> build("gate_loop", 16, n_heads=4).state_size
        64
    """
    mixer = get(name)
    known = [p.name for p in inspect.signature(mixer).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for argument in arguments:
        if argument not in known:
            raise unknown(f"argument of mixer {name!r} called", argument, known)
    return mixer(d_model, **arguments)
