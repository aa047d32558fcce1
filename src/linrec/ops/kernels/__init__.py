"""Kernels alone, Triton's and Numba's, by kind, so that all that is alike stands side by side.

| folder | recurrence | operators |
|---|---|---|
| `elementwise` | one number per channel | `scan`, and `gate_loop` with heads of one channel |
| `matrix` | a matrix per head | `gate_loop`, `delta_rule` |
| `selective` | a few states per channel | `selective_scan` |
| `fft` | what lies between two transforms, and sums that make kernels | `long_conv`, state-space kernels |

Modules with kernels are imported at the first use, because importing Triton and Numba is slow.
"""

import functools
import importlib
from types import ModuleType
from typing import Any


class Kernels:
    """A module of kernels, imported at the first use of a kernel.

    Args:
        name: the module's name within this package, as "elementwise.scan_triton".
    """

    def __init__(self, name: str) -> None:
        self._name = f"{__name__}.{name}"

    @functools.cached_property
    def _module(self) -> ModuleType:
        return importlib.import_module(self._name)

    def __getattr__(self, kernel: str) -> Any:
        return getattr(self._module, kernel)
