"""Conditions for backends to run: installed packages, the device of the tensors, torch.export."""

import functools
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def _constant_in_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """Have torch.compile call the function while it traces: no import or trial belongs into a graph."""
    # as torch.compiler.assume_constant_result does, which imports the compiler, and that takes a second
    marked: Any = function
    marked._dynamo_marked_constant = True
    return function


@_constant_in_graphs
def exporting() -> bool:
    """Return whether torch.export is tracing.

    `torch.compiler.is_exporting` means the same, but in torch 2.11 it is true under torch.compile as well.

    Example:
        >>> exporting()
        False
    """
    return torch.compiler._is_exporting_flag


@_constant_in_graphs
def numba_usable() -> bool:
    """Return whether Numba compiles and caches on this machine; warn once when it does not.

    Example:
        >>> numba_usable() in (True, False)
        True
    """
    # within an export the probe itself would fail, and its result is kept for the process
    if exporting():
        return False
    problem = _numba_problem()
    if problem is not None:
        _warn_about_numba(problem)
    return problem is None


@_constant_in_graphs
def usable(backend: str, device_type: str) -> bool:
    """Return whether `"auto"` may choose a backend on this device: while exporting, only ATen operations.

    Example:
        >>> usable("torch", "meta"), usable("triton", "cpu")
        (True, False)
    """
    if backend == "numba":
        return device_type == "cpu" and numba_usable()
    if backend == "triton":
        return device_type == "cuda" and not exporting() and _triton_problem() is None
    return True


@_constant_in_graphs
def refusal(op_name: str, backend: str, device_type: str) -> str | None:
    """Return why an explicitly chosen backend cannot run on this device and machine, or None.

    Args:
        op_name: the operator's name.
        backend: an existing backend.
        device_type: where the tensors are.

    Example:
        >>> print(refusal("scan", "numba", "cuda"))
        backend='numba' of `scan` runs on 'cpu'; got tensors on 'cuda'. Move them, or choose another backend.
    """
    called = f"backend={backend!r} of `{op_name}`"
    if exporting() and backend in ("numba", "triton"):
        return f'{called} cannot be exported: a program holds ATen operators only. Leave it at "auto".'
    elsewhere = f"got tensors on {device_type!r}. Move them, or choose another backend."
    if backend == "numba":
        if device_type != "cpu":
            return f"{called} runs on 'cpu'; {elsewhere}"
        problem = _numba_problem()
        return problem and f"{called} needs a working Numba; it fails with {problem}. {_NUMBA_CURE}"
    if backend == "triton":
        problem = _triton_problem()
        if problem is not None:
            return f"{called} needs Triton; it fails with {problem}. Install `triton`."
        if device_type != "cuda":
            import triton

            if not triton.knobs.runtime.interpret:
                return f"{called} runs on 'cuda'; {elsewhere}"
    return None


_NUMBA_CURE = "Install a working `numba`, or set NUMBA_CACHE_DIR to a directory that can be written."


@functools.cache
def _numba_problem() -> str | None:
    # an absent package, a broken LLVM and an unwritable cache each raise something else, and none of them may
    # stop a caller who did not ask for Numba
    try:
        import numba

        @numba.njit(cache=True)
        def successor(number: float) -> float:
            return number + 1.0

        successor(1.0)
        # starting Numba's OpenMP threads sets the number of threads that torch uses too: start them now, and
        # put it back
        threads = torch.get_num_threads()
        numba.set_num_threads(numba.get_num_threads())
        torch.set_num_threads(threads)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


@functools.cache
def _warn_about_numba(problem: str) -> None:
    warnings.warn(
        f"Numba does not work here ({problem}); linrec uses its slower torch backend. {_NUMBA_CURE}",
        RuntimeWarning,
        # the line that called the operator
        stacklevel=9,
    )


@functools.cache
def _triton_problem() -> str | None:
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"{type(error).__name__}: {error}"
    return None
