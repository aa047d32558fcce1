"""Time mixers, one file per paper. The file's name is the name that users type.

A mixer is found by its file: `names` lists the files of this folder and `get` imports one, so adding a model
is adding a file. The first entry of the file's `__all__` is the mixer's class.
"""

import importlib
import inspect
import pkgutil
import sys
from typing import Any

from linrec.errors import unknown
from linrec.nn.mixer import Mixer, State, Transitions

__all__ = ["Mixer", "State", "Transitions", "build", "get", "names"]


def names() -> list[str]:
    """Names of all mixers, sorted.

    Example:
        >>> "gate_loop" in names()
        True
    """
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def get(name: str) -> type[Mixer]:
    """The class of the mixer called `name`; hyphens and underscores are equal.

    Args:
        name: one of `names()`; or where a mixer of your own is, as in "my_package.my_module:MyMixer", a
            `Mixer` that Python can import; importing runs the module's code.

    Raises:
        ValueError: there is no such mixer; the message names the nearest one.

    Example:
        >>> get("gate_loop").__name__
        'GateLoop'
    """
    if ":" in name:
        return _imported(*name.split(":", 1))
    file = name.replace("-", "_")
    # to look through the folder takes milliseconds
    if f"{__name__}.{file}" not in sys.modules and file not in names():
        raise unknown("mixer", name, names())
    module = importlib.import_module(f"{__name__}.{file}")
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


def _imported(module_name: str, class_name: str) -> type[Mixer]:
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"mixer '{module_name}:{class_name}' cannot be imported: {error}. Python looks for modules in "
            "the folders of PYTHONPATH and among what is installed."
        ) from error
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, Mixer)):
        mixers = [name for name, value in vars(module).items() if _is_mixer(value)]
        raise ValueError(
            f"`{class_name}` in module {module_name} is not a linrec.mixers.Mixer; "
            f"the module has {', '.join(mixers) or 'none'}."
        )
    return found


def _is_mixer(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Mixer) and value is not Mixer
