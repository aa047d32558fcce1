"""Conditions for backends to run: installed packages, the device of the tensors, torch.export."""

import functools
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from linrec.torch_private import tracing_export

P = ParamSpec("P")
T = TypeVar("T")


def _constant_in_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """Mark a function as constant for torch.compile, so that imports and probes do not enter a graph."""
    # like torch.compiler.assume_constant_result, without importing the compiler, which takes a second
    marked: Any = function
    marked._dynamo_marked_constant = True
    return function


@_constant_in_graphs
def exporting() -> bool:
    """Return whether torch.export is tracing.

    Example:
        >>> exporting()
        False
    """
    return tracing_export()


@_constant_in_graphs
def numba_usable() -> bool:
    """Return whether Numba can compile and cache on this machine; warn once if it cannot.

    Example:
        >>> numba_usable() in (True, False)
        True
    """
    # during an export the probe would fail, and its result is cached for the whole process
    if exporting():
        return False
    problem = _numba_problem()
    if problem is not None:
        _warn_about_numba(problem)
    return problem is None


@_constant_in_graphs
def usable(backend: str, device_type: str) -> bool:
    """Return whether `"auto"` may choose a backend on this device; an export allows only ATen operations.

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
    """Return the reason why an explicitly chosen backend cannot run here, or None if it can.

    Args:
        op_name: the operator's name.
        backend: an existing backend.
        device_type: device type of the tensors.

    Example:
        >>> print(refusal("scan", "numba", "cuda"))
        backend='numba' of `scan` runs on 'cpu'; got tensors on 'cuda'. Move them, or choose another backend.
    """
    called = f"backend={backend!r} of `{op_name}`"
    if exporting() and backend in ("numba", "triton"):
        return f'{called} cannot be exported: a program holds only ATen operators. Leave it at "auto".'
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
    # an absent package, a broken LLVM and an unwritable cache raise different errors; callers who did not ask
    # for Numba should see none of them
    try:
        import numba

        @numba.njit(cache=True)
        def successor(number: float) -> float:
            return number + 1.0

        successor(1.0)
        # starting Numba's OpenMP threads also changes torch's number of threads, so start them now and
        # restore the number
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
        # points at the line that called the operator
        stacklevel=9,
    )


@functools.cache
def _triton_problem() -> str | None:
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"{type(error).__name__}: {error}"
    return None
