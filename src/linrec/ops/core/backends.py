"""The table of an operator: its backends in order of preference, and when they can run on this machine."""

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic

import torch

# the function itself, which vLLM replaces in `torch` by another that does nothing
from torch import set_num_threads

from linrec.errors import unknown
from linrec.ops.core.ambient import constant_in_graphs, exporting
from linrec.ops.core.kernel import In, differentiated

Pair = tuple[str, str]
"""(mode, backend): the algorithm, and its implementation."""


MODES = ("recurrent", "scan", "chunkwise", "attention", "convolution", "newton", "quasi_newton", "damped")
"""The algorithms; the last three are of `nonlinear_scan`."""
NAMES = ("reference", "torch", "numba", "triton")


def always(inputs: object) -> bool:
    """Return True: a condition for backends that accept all inputs."""
    return True


def never(inputs: object) -> bool:
    """Return False: a condition for backends that `"auto"` never chooses."""
    return False


WITHOUT_RESET: Any = {"accepts": lambda given: given.reset is None, "requires": "calls without `reset`"}
"""The value of `requires` for a backend without resets."""


@dataclass(frozen=True)
class Backend(Generic[In]):
    """An implementation of an operator: an entry of its table.

    Attributes:
        mode: the algorithm, one of `MODES`.
        name: the implementation, one of `NAMES`.
        run: a function of the operator's canonical inputs that returns (y, state), or y if there is no state.
        about: a short description for the tables of the documentation.
        kernel: name of the entry, if several entries have the same mode and name.
        accepts: whether the backend supports these inputs. It may depend on dtypes, flags, heads and sizes,
            and on time only through `t <= 1`, so that an exported program works for all lengths.
        requires: description of the condition in `accepts`, for errors.
        auto: whether `"auto"` prefers the backend for these inputs. Other backends can still be chosen by
            name.
        differentiable: whether it supports gradients.
        widen: whether half-precision inputs are converted to the accumulation dtype before `run`.
    """

    mode: str
    name: str
    run: Callable[[In], Any]
    about: str
    kernel: str = ""
    accepts: Callable[[In], bool] = always
    requires: str = ""
    auto: Callable[[In], bool] = always
    differentiable: bool = True
    widen: bool = True


def pairs(backends: Sequence[Backend[Any]]) -> tuple[Pair, ...]:
    """Return the distinct (mode, backend) pairs of a table."""
    return tuple(dict.fromkeys((entry.mode, entry.name) for entry in backends))


def table(backends: Sequence[Backend[Any]], indent: str = "    ") -> str:
    """Return the table in Markdown, for docstrings."""
    rows = [("mode", "backend", "implementation"), ("---", "---", "---")]
    rows += [(entry.mode, entry.name, entry.about) for entry in backends]
    return f"\n{indent}".join(f"| {' | '.join(row)} |" for row in rows)


def check_table(op_name: str, backends: Sequence[Backend[Any]]) -> None:
    """Raise ValueError for an entry with an unknown mode or name, and for one that no call reaches."""
    for place, entry in enumerate(backends):
        pair = entry.mode, entry.name
        if entry.mode not in MODES or entry.name not in NAMES:
            raise ValueError(
                f"the table of `{op_name}` has an entry {pair}; modes are {', '.join(MODES)}, and backends "
                f"{', '.join(NAMES)}."
            )
        for earlier in backends[:place]:
            comes_first = earlier.auto is always or entry.auto is never
            takes_all = earlier.accepts is always and earlier.differentiable
            if pair == (earlier.mode, earlier.name) and comes_first and takes_all:
                raise ValueError(
                    f"no call of `{op_name}` reaches the entry {pair} {entry.about!r}: an earlier entry of "
                    "this mode and backend takes all inputs. Give the earlier entry `accepts`."
                )


def check_mode(op_name: str, backends: Sequence[Backend[Any]], mode: str) -> None:
    """Raise ValueError for an unknown mode; the message gives the nearest mode."""
    modes = ["auto", *dict.fromkeys(entry.mode for entry in backends)]
    if mode not in modes:
        raise unknown(f"`mode` of `{op_name}` called", mode, modes)


def choose(
    op_name: str, backends: Sequence[Backend[In]], inputs: In, device_type: str, mode: str, backend: str
) -> Backend[In]:
    """Return the backend that runs a call.

    It is the first entry of the table with the given mode and backend that can run on this machine, accepts
    the inputs, and supports gradients if they are needed. Entries that `"auto"` does not prefer come last.

    Args:
        op_name: the operator's name, for errors.
        backends: the operator's table.
        inputs: the operator's canonical inputs.
        device_type: device type of the tensors.
        mode: a mode, or "auto".
        backend: a backend, or "auto".
    """
    for preferred in (True, False):
        for entry in backends:
            if (
                mode in ("auto", entry.mode)
                and backend in ("auto", entry.name)
                and _can_run(op_name, entry.name, device_type, named=backend != "auto")
                and (not preferred or entry.auto(inputs))
                and entry.accepts(inputs)
                and (entry.differentiable or not differentiated(*inputs))
            ):
                return entry
    raise ValueError(_refused(op_name, backends, inputs, device_type, mode, backend))


def few(time: int, most: int) -> bool:
    """Return whether there are at most `most` steps; during export, whether there is at most one step.

    An exported program is valid for all lengths from 2 on; comparing the length with another number would
    restrict it.
    """
    return time <= 1 or (not exporting() and time <= most)


def _can_run(op_name: str, backend: str, device_type: str, *, named: bool) -> bool:
    if backend in ("torch", "reference"):
        return True
    return refusal(op_name, backend, device_type) is None if named else usable(backend, device_type)


def _refused(
    op_name: str, backends: Sequence[Backend[In]], inputs: In, device_type: str, mode: str, backend: str
) -> str:
    """Return the reason why no entry of the table can run the call."""
    check_mode(op_name, backends, mode)
    names = list(dict.fromkeys(entry.name for entry in backends))
    if backend not in ("auto", *names):
        raise unknown(f"`backend` of `{op_name}` called", backend, ["auto", *names])
    matching = [
        entry for entry in backends if mode in ("auto", entry.mode) and backend in ("auto", entry.name)
    ]
    if not matching:
        listed = ", ".join(f"({m!r}, {b!r})" for m, b in pairs(backends))
        return (
            f"`{op_name}` has no (mode, backend) = ({mode!r}, {backend!r}); the pairs that exist are "
            f"{listed}. "
            'Leave one of the two at "auto" to have it chosen.'
        )
    reasons = []
    for entry in matching:
        called = f"(mode, backend) = ({entry.mode!r}, {entry.name!r}) of `{op_name}`"
        reason = refusal(op_name, entry.name, device_type)
        if reason is None and not entry.accepts(inputs):
            reason = f'{called} takes {entry.requires}. Leave mode and backend at "auto".'
        cure = 'Call it under `torch.no_grad()`, or leave mode and backend at "auto".'
        reasons.append(reason or f"{called} has no gradients. {cure}")
    return " ".join(dict.fromkeys(reasons))


@constant_in_graphs
def numba_usable() -> bool:
    """Return whether Numba can compile and cache on this machine; warn once if it cannot."""
    # during an export the probe would fail, and its result is cached for the whole process
    if exporting():
        return False
    problem = _numba_problem()
    if problem is not None:
        _warn_about_numba(problem)
    return problem is None


@constant_in_graphs
def usable(backend: str, device_type: str) -> bool:
    """Return whether `"auto"` may choose a backend on this device; an export allows only ATen operations."""
    if backend == "numba":
        return device_type == "cpu" and numba_usable()
    if backend == "triton":
        return device_type == "cuda" and not exporting() and _triton_problem() is None
    return True


@constant_in_graphs
def refusal(op_name: str, backend: str, device_type: str) -> str | None:
    """Return the reason why an explicitly chosen backend cannot run here, or None if it can.

    Args:
        op_name: the operator's name.
        backend: an existing backend.
        device_type: device type of the tensors.
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
        set_num_threads(threads)
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
