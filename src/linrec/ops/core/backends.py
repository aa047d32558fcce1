"""The table of an operator: a list of its backends in order of preference."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic

from linrec.errors import unknown
from linrec.ops.core.kernel import In, differentiated
from linrec.ops.core.machine import exporting, refusal, usable

Pair = tuple[str, str]
"""(mode, backend): the algorithm, and its implementation."""


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
        mode: the algorithm: "recurrent", "scan", "chunkwise", "attention" or "convolution".
        name: the implementation: "reference", "torch", "numba" or "triton".
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

    Raises:
        ValueError: the mode or backend is unknown, or the pair does not exist or cannot run.
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
