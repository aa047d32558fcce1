"""Linear recurrent sequence models on one idea: S_t = diag(a_t) S_{t-1} + k_t^T v_t, y_t = Re(q_t S_t).

`linrec.hippo`, `mixers`, `models`, `nn` and `ops` are imported when they are first used. Other packages are
imported by name, such as `linrec.lab.train`. `docs/stability.md` says which packages need extras.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from linrec import hippo as hippo
    from linrec import mixers as mixers
    from linrec import models as models
    from linrec import nn as nn
    from linrec import ops as ops

# the one place of the version; pyproject.toml reads it without importing torch
__version__ = "0.1.0"

_MODULES = ("hippo", "mixers", "models", "nn", "ops")


if not TYPE_CHECKING:
    # unseen by type checkers, for which a module with `__getattr__` has every attribute
    def __getattr__(name: str) -> ModuleType:
        # lazy: the command line starts, and Ctrl-C can stop it, before torch is imported
        if name in _MODULES:
            return importlib.import_module(f"linrec.{name}")
        raise AttributeError(f"module 'linrec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
