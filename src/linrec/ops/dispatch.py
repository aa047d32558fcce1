"""Chooses who runs an operator: pure functions of shape, device and what is installed, and the probes."""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from linrec.errors import unknown

P = ParamSpec("P")
T = TypeVar("T")

Pair = tuple[str, str]
"""(mode, backend): the mathematics, and who runs it."""


def resolve(op_name: str, pairs: Sequence[Pair], mode: str, backend: str, auto: Sequence[Pair]) -> Pair:
    """Return the (mode, backend) pair that a call runs.

    What is given explicitly is obeyed or refused; only "auto" is filled in: with the first pair of `auto`
    that agrees with the explicit part, else with the first such pair of `pairs`.

    Args:
        op_name: the operator's name, for the error.
        pairs: every pair that exists.
        mode: a mode, or "auto".
        backend: a backend, or "auto".
        auto: the pairs that are usable for this call, best first.

    Returns:
        One element of `pairs`.

    Raises:
        ValueError: an unknown mode or backend, or a combination that does not exist.

    Example:
        >>> pairs = [("recurrent", "torch"), ("scan", "torch"), ("scan", "triton")]
        >>> resolve("scan", pairs, "auto", "torch", auto=[("scan", "triton"), ("scan", "torch")])
        ('scan', 'torch')
    """
    check_mode(op_name, pairs, mode)
    backends = list(dict.fromkeys(pair[1] for pair in pairs))
    if backend != "auto" and backend not in backends:
        raise unknown(f"backend of `{op_name}` called", backend, ["auto", *backends])
    for pair in [*auto, *pairs]:
        if pair in pairs and mode in ("auto", pair[0]) and backend in ("auto", pair[1]):
            return pair
    listed = ", ".join(f"({m!r}, {b!r})" for m, b in pairs)
    raise ValueError(
        f"`{op_name}` has no (mode, backend) = ({mode!r}, {backend!r}); the pairs that exist are {listed}. "
        f'Leave one of the two at "auto" to have it chosen.'
    )


def check_mode(op_name: str, pairs: Sequence[Pair], mode: str) -> None:
    """Refuse a mode that the operator does not have, as `resolve` does when it runs.

    Args:
        op_name: the operator's name.
        pairs: every pair that exists.
        mode: a mode, or "auto".

    Raises:
        ValueError: an unknown mode; the message names the nearest one.

    Example:
        >>> check_mode("scan", [("recurrent", "torch"), ("scan", "torch")], "auto")
    """
    modes = ["auto", *dict.fromkeys(pair[0] for pair in pairs)]
    if mode not in modes:
        raise unknown(f"mode of `{op_name}` called", mode, modes)


def auto_scan(
    shape: tuple[int, int, int], device_type: str, *, numba: bool, triton: bool, exporting: bool = False
) -> list[Pair]:
    """Return the pairs that `ops.scan` may run on, best first.

    | call | first choice | why |
    |---|---|---|
    | one step | (recurrent, torch) | a kernel's launch costs more than the step |
    | being exported | (scan, torch) | the program must run where linrec's kernels are not |
    | CUDA with Triton | (scan, triton) | |
    | CPU with Numba | (recurrent, numba) | |
    | at most 16 steps | (recurrent, torch) | fewer launches than the blocked scan |
    | else | (scan, torch) | |

    Args:
        shape: (batch, time, channels).
        device_type: "cpu", "cuda", "mps", "meta", ...
        numba: Numba works on this machine.
        triton: Triton works on this device.
        exporting: torch.export is tracing the call.

    Returns:
        Usable pairs, best first; never empty.

    Example:
        >>> auto_scan((8, 4096, 512), "cpu", numba=True, triton=False)[0]
        ('recurrent', 'numba')
    """
    time = shape[1]
    order: list[Pair] = [("scan", "torch"), ("recurrent", "torch")]
    # one program serves all lengths from 2 on: a comparison with any other number would limit them
    if time <= 1 or (not exporting and time <= SHORT):
        order.reverse()
    if exporting or time <= 1:
        return order
    if triton and device_type == "cuda":
        return [("scan", "triton"), *order]
    if numba and device_type == "cpu":
        return [("recurrent", "numba"), *order]
    return order


SHORT = 16
"""Up to this many steps, a loop over time in torch launches fewer operations than the blocked scan."""


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

    While torch.export is tracing, no kernel is usable: exported programs run where linrec is not installed.

    Example:
        >>> numba_usable() in (True, False)
        True
    """
    # within a trace the probe itself would fail, and its result is kept for the process
    if exporting():
        return False
    problem = _numba_problem()
    if problem is not None:
        _warn_about_numba(problem)
    return problem is None


@_constant_in_graphs
def triton_usable(device_type: str) -> bool:
    """Return whether Triton kernels run on tensors of this device type; not while torch.export is tracing.

    Args:
        device_type: "cpu", "cuda", ...

    Example:
        >>> triton_usable("meta")
        False
    """
    return device_type == "cuda" and not exporting() and _triton_problem() is None


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
        if device_type != "cuda" and not _triton_interprets():
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
        stacklevel=4,
    )


@functools.cache
def _triton_problem() -> str | None:
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"{type(error).__name__}: {error}"
    return None


def _triton_interprets() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)
