"""Handlers: who is asked before a public call runs.

`linrec.parallel.time_parallel` splits calls over processes, and `recording` lists them. Most of the time
there is no handler, and a call pays for the look at an empty list.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from linrec.ops.core.backends import Backend

Result = tuple[Any, Any]


class Call(NamedTuple):
    """A public call, checked and resolved.

    Attributes:
        operator: the operator, an instance of `linrec.ops.core.call.Operator`.
        inputs: its canonical inputs, a named tuple.
        backend: the entry of the table that runs.
    """

    operator: Any
    inputs: Any
    backend: Backend


Handler = Callable[[Call, Callable[[], Result]], Result]
"""Takes a call and a function that goes on with it, and returns the outputs of the call."""

# of the process, not of a thread: a checkpointed forward pass runs again in a thread of autograd's. A context
# variable would break the graphs of torch.compile
handlers: list[Handler] = []


class TimeSplit(ABC):
    """A handler that runs calls on this process's part of the steps of every sequence.

    Attributes:
        operators: names of the operators that it runs. An operator that is made of others goes on to them,
            and any other one is refused.
    """

    operators: tuple[str, ...] = ()

    @abstractmethod
    def run(self, call: Call) -> Result:
        """Run a call of one of the operators."""

    def __call__(self, call: Call, proceed: Callable[[], Result]) -> Result:
        """Run the call, or go on to the calls that it makes."""
        if call.operator.name in self.operators:
            return self.run(call)
        if not call.operator.composed:
            refuse_split_time(call.operator.name)
        return proceed()


def time_is_split() -> bool:
    """Return whether each process has some of the steps of a sequence."""
    return any(isinstance(handler, TimeSplit) for handler in handlers)


def refuse_split_time(name: str) -> None:
    """Raise where time is split: for functions that need all steps of a sequence at once.

    Args:
        name: the function's name, for the error.

    Raises:
        ValueError: time is split over processes.

    Example:
        >>> refuse_split_time("attention")
    """
    if time_is_split():
        raise ValueError(
            f"`{name}` needs all steps of a sequence in one process; within `time_parallel` each has a part. "
            "Use causal mixers on `scan` or `gate_loop`, or give each process some of the batch instead."
        )


def handled(call: Call, run: Callable[[], Result]) -> Result:
    """Ask the handlers about a call, the latest first, and then run it."""
    for handler in handlers:
        run = partial(handler, call, run)
    return run()


@contextlib.contextmanager
def handling(handler: Handler) -> Iterator[None]:
    """Ask the handler about every call within the context."""
    handlers.append(handler)
    try:
        yield
    finally:
        handlers.remove(handler)


@contextlib.contextmanager
def unhandled() -> Iterator[None]:
    """Run calls within the context without any handler."""
    before = handlers[:]
    handlers.clear()
    try:
        yield
    finally:
        handlers[:] = before


@contextlib.contextmanager
def recording() -> Iterator[list[Call]]:
    """List the calls of operators within the context, and not the calls that operators make themselves.

    Example:
        >>> import torch
        >>> from linrec.ops import scan
        >>> with recording() as calls:
        ...     y, state = scan(torch.tensor(0.5), torch.ones(1, 4, 1), mode="scan")
        >>> [(call.operator.name, call.backend.mode, call.backend.name) for call in calls]
        [('scan', 'scan', 'torch')]
    """
    calls: list[Call] = []
    depth = 0

    def record(call: Call, proceed: Callable[[], Result]) -> Result:
        nonlocal depth
        if depth == 0:
            calls.append(call)
        depth += 1
        try:
            return proceed()
        finally:
            depth -= 1

    with handling(record):
        yield calls
