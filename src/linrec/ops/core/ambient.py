"""Surroundings of a call: values that contexts set for the calls of their own thread, and torch.export."""

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

from linrec.torch_private import tracing_export

__all__ = ["Ambient", "checkpointed", "constant_in_graphs", "exporting"]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Ambient(Generic[T]):
    """A value that contexts replace for the calls of their own thread, or of their own asyncio task.

    A compiler cannot read the value of a thread. While a thread is in a context that compiled calls must see,
    compiled calls are a graph break in all threads, and `fullgraph=True` refuses them. They ignore other
    contexts.

    Args:
        name: for `repr`.
        default: the value outside of all contexts.
    """

    def __init__(self, name: str, default: T) -> None:
        self._value = contextvars.ContextVar(name, default=default)
        self._default, self._lock = default, threading.Lock()
        # contexts of all threads that compiled calls must see: compilers guard this number
        self._entered = 0

    def get(self) -> T:
        """Return the value of the innermost context of this thread."""
        if not torch.compiler.is_compiling():
            return self._value.get()
        if not self._entered:
            return self._default
        # the decorator imports the compiler, which takes seconds
        read: Callable[[], T] = torch.compiler.disable(self._read)
        return read()

    def _read(self) -> T:
        return self._value.get()

    @contextmanager
    def set(self, value: T, *, compiled: bool = True) -> Iterator[T]:
        """Replace the value within the context.

        Args:
            value: the value, which the context yields.
            compiled: whether compiled calls must see it.
        """
        self._enter(compiled)
        token = self._value.set(value)
        try:
            yield value
        finally:
            self._value.reset(token)
            self._enter(-compiled)

    def _enter(self, by: int) -> None:
        with self._lock:
            self._entered += by


def checkpointed(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function under activation checkpointing; its second run sees the contexts of the first.

    The backward pass, which runs the function again, may be in a thread of autograd.
    """
    run: Any = function
    if not torch.compiler.is_compiling():
        # a copy for each run, because a context cannot be entered twice at a time
        held = contextvars.copy_context()

        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            return held.copy().run(function, *args, **kwargs)

    again: Callable[P, R] = partial(checkpoint, run, use_reentrant=False)
    return again


def constant_in_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function as constant for torch.compile, so that imports and probes do not enter a graph."""
    # like torch.compiler.assume_constant_result, without importing the compiler, which takes a second
    marked: Any = function
    marked._dynamo_marked_constant = True
    return function


@constant_in_graphs
def exporting() -> bool:
    """Return whether torch.export is tracing."""
    return tracing_export()
