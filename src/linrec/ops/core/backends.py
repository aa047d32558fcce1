"""The table of an operator: one list of the backends that exist, in order of preference."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from linrec.errors import unknown
from linrec.ops.core.kernel import differentiated
from linrec.ops.core.machine import exporting, refusal, usable

Pair = tuple[str, str]
"""(mode, backend): the mathematics, and who computes it."""


def always(inputs: Any) -> bool:
    """Return True: the backend takes all inputs."""
    return True


def never(inputs: Any) -> bool:
    """Return False: `"auto"` does not choose the backend by itself."""
    return False


WITHOUT_RESET: Any = {"accepts": lambda given: given.reset is None, "requires": "calls without `reset`"}
"""What a backend says that has no resets."""


@dataclass(frozen=True)
class Backend:
    """One way to run an operator: an entry of its table.

    Attributes:
        mode: the mathematics: "recurrent", "scan", "chunkwise", "attention" or "convolution".
        name: who computes: "reference", "torch", "numba" or "triton".
        run: a function of the operator's canonical inputs that returns (y, state); y where there is no state.
        about: a few words for the tables of the documentation.
        kernel: a name for the entry, where several stand behind one pair.
        accepts: whether the backend takes these inputs. It looks at dtypes, flags, heads and sizes, and of
            time only at `t <= 1`, so that an exported program serves all lengths.
        requires: what `accepts` asks for, for errors.
        auto: whether `"auto"` chooses the backend here. A backend that no one prefers can still be named.
        differentiable: whether it has gradients.
        widen: whether inputs in half precision are converted to the accumulation dtype before `run`.
    """

    mode: str
    name: str
    run: Callable[[Any], Any]
    about: str
    kernel: str = ""
    accepts: Callable[[Any], bool] = always
    requires: str = ""
    auto: Callable[[Any], bool] = always
    differentiable: bool = True
    widen: bool = True


def pairs(backends: Sequence[Backend]) -> tuple[Pair, ...]:
    """Return the (mode, backend) pairs of a table, each once."""
    return tuple(dict.fromkeys((entry.mode, entry.name) for entry in backends))


def table(backends: Sequence[Backend], indent: str = "    ") -> str:
    """Return the table as Markdown, for docstrings."""
    rows = [("mode", "backend", "what it is"), ("---", "---", "---")]
    rows += [(entry.mode, entry.name, entry.about) for entry in backends]
    return f"\n{indent}".join(f"| {' | '.join(row)} |" for row in rows)


def check_mode(op_name: str, backends: Sequence[Backend], mode: str) -> None:
    """Raise ValueError for a mode that the operator does not have; the message names the nearest one."""
    modes = ["auto", *dict.fromkeys(entry.mode for entry in backends)]
    if mode not in modes:
        raise unknown(f"mode of `{op_name}` called", mode, modes)


def choose(
    op_name: str, backends: Sequence[Backend], inputs: Any, device_type: str, mode: str, backend: str
) -> Backend:
    """Return the backend that a call runs.

    It is the first entry of the table that has the given mode and backend, can run here, accepts the inputs,
    and has gradients where they are needed. Entries that `"auto"` does not choose come after the others.

    Args:
        op_name: the operator's name, for errors.
        backends: the operator's table.
        inputs: the operator's canonical inputs.
        device_type: where the tensors are.
        mode: a mode, or "auto".
        backend: a backend, or "auto".

    Raises:
        ValueError: an unknown mode or backend, a combination that does not exist, or one that cannot run.
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
    """Return whether there are so few steps; an exported program only knows a single step.

    One program serves all lengths from 2 on: a comparison with any other number would limit them.
    """
    return time <= 1 or (not exporting() and time <= most)


def _can_run(op_name: str, backend: str, device_type: str, *, named: bool) -> bool:
    if backend in ("torch", "reference"):
        return True
    return refusal(op_name, backend, device_type) is None if named else usable(backend, device_type)


def _refused(
    op_name: str, backends: Sequence[Backend], inputs: Any, device_type: str, mode: str, backend: str
) -> str:
    """Why no entry of the table runs the call."""
    check_mode(op_name, backends, mode)
    names = list(dict.fromkeys(entry.name for entry in backends))
    if backend not in ("auto", *names):
        raise unknown(f"backend of `{op_name}` called", backend, ["auto", *names])
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
