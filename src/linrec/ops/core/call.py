"""The path of every public call, from its arguments to the backend.

1. Tensors: every argument is a dense tensor on the same device, and `reset` is bool (`checks.check_tensors`).
2. The operator checks shapes, dtypes and values, and returns its inputs in canonical form. The initial state
   is checked here.
3. The table selects the backend (`backends.choose`).
4. Handlers, if there are any, run or observe the call: `linrec.parallel.time_parallel` splits calls over
   processes, and `recording` lists them. Most threads run without handlers.
5. If an axis is empty, zeros are returned without running the backend.
6. Half-precision inputs are widened, unless the backend supports them; autocast is disabled.
7. The backend runs, and the output is cast to its dtype.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, ParamSpec, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor
from torch.compiler import is_compiling

from linrec.ops.core.ambient import Ambient
from linrec.ops.core.backends import Backend, Pair, check_mode, check_table, choose, never, pairs, table
from linrec.ops.core.checks import check_reset, check_state, check_tensors, option_fields, tensor_fields
from linrec.ops.core.kernel import In
from linrec.ops.core.precision import widened, without_autocast
from linrec.rules import typed
from linrec.trees import Tree, leaves, map_tree

Result = tuple[Any, Any]
Space = tuple[Sequence[int], torch.dtype]
P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


@dataclass(eq=False)
class Operator(Generic[In]):
    """An operator: its table of backends, and the steps of every call before a backend runs.

    Attributes:
        name: the public name.
        inputs: the named tuple of its inputs, for arguments and for backends.
        sequence: name of the input of shape (batch, time, ..), on whose device all tensors must be.
        canonical: checks the arguments, and returns the inputs of the backends.
        output: returns shape and dtype of y.
        axes: the axes of the state, such as "(b, c)" or "(b, h, dk, dv + 1)".
        state: returns shape and dtype of the state; None if the operator checks its state itself.
        backends: the table, in order of preference.
        zeros: whether backends receive zeros if the state is None.
        is_empty: whether there is nothing to compute even though no axis of y is empty.
        composed: whether every backend calls other operators, which handle split time themselves.
        empty: makes the initial state of size (batch, *sizes); see `empty_state`.
    """

    name: str
    inputs: type[In]
    sequence: str
    canonical: Callable[[In], In]
    output: Callable[[In], Space]
    axes: str
    state: Callable[[In], Space] | None
    backends: Sequence[Backend[In]]
    zeros: bool = True
    is_empty: Callable[[In], bool] = never
    composed: bool = False
    empty: Callable[..., Any] = torch.zeros

    def __post_init__(self) -> None:
        check_table(self.name, self.backends)
        self._tensors, self._options = tensor_fields(self.inputs), option_fields(self.inputs)

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """The (mode, backend) pairs of the table."""
        return pairs(self.backends)

    def empty_state(
        self,
        batch: int,
        *sizes: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> Any:
        """Return the initial state of `batch` sequences, which is equivalent to None.

        Args:
            batch: batch size b.
            sizes: sizes of the state's `axes` after the batch: (h, dk, dv) for `gate_loop`, also for
                `normalized_gate_loop`, whose state has dv + 1 columns, and for attention, whose cache starts
                empty; (width, c) for `short_conv`; (0, d) for `long_conv`, whose state is its past inputs.
            dtype: accumulation dtype, complex for recurrences with phases.
            device: device of the state.
        """
        # the axis "dv + 1" has the size name "dv"
        names = [axis.partition(" ")[0] for axis in self.axes.strip("()").split(", ")[1:]]
        if len(sizes) != len(names):
            listed = ", ".join(names)
            raise ValueError(f"`sizes` of the state of `{self.name}` must be ({listed}); got {sizes}.")
        return self.empty(batch, *sizes, dtype=dtype, device=device)

    def check_mode(self, mode: str) -> None:
        """Raise ValueError for an unknown mode, without calling the operator."""
        check_mode(self.name, self.backends, mode)

    def __call__(self, inputs: In, mode: str, backend: str) -> Result:
        """Run the operator on its arguments, and return y and the state."""
        # a graph's numbers may be symbols
        if self._options and not is_compiling():
            typed(self._options, **{name: getattr(inputs, name) for name in self._options})
        sequence = check_tensors(inputs, self._tensors, self.sequence)
        # not every operation takes a lazy conjugate, least of all under vmap; a compiler cannot ask for it
        if any(isinstance(x, Tensor) and x.is_complex() for x in inputs):
            inputs = map_tree(torch.resolve_conj, inputs)
        given: Any = self.canonical(inputs)
        check_reset(given.reset, sequence)
        if self.state is not None and given.state is not None:
            shape, dtype = self.state(given)
            check_state(given.state, self.axes, shape, dtype)
            if given.state.dtype != dtype:
                given = given._replace(state=given.state.to(dtype))
        return self.proceed(given, mode, backend)

    def proceed(self, inputs: In, mode: str, backend: str) -> Result:
        """Choose a backend for canonical inputs, and run it through the handlers."""
        device = getattr(inputs, self.sequence).device.type
        entry = choose(self.name, self.backends, inputs, device, mode, backend)
        handlers = _HANDLERS.get()
        if not handlers:
            return self.run(inputs, entry)
        call, proceed = Call(self, inputs, entry), partial(self.run, inputs, entry)
        # the handler added last runs first
        for handler in handlers:
            proceed = partial(handler, call, proceed)
        return proceed()

    def run(self, inputs: In, entry: Backend[In]) -> Result:
        """Run an entry of the table on canonical inputs."""
        given: Any = inputs
        sequence = getattr(given, self.sequence)
        shape, dtype = self.output(given)
        is_empty = self.state is not None and (
            self.is_empty(given)
            # without outputs, the state may still be non-empty
            or (0 in shape and (0 in sequence.shape or 0 in self.state(given)[0]))
        )
        # a process without steps still passes on the state that it receives
        is_empty = is_empty and not (self.composed and time_is_split())
        if self.state is not None and given.state is None and (self.zeros or is_empty):
            of_state, wide = self.state(given)
            given = given._replace(state=sequence.new_zeros(of_state, dtype=wide))
        if is_empty:
            return zeros_of(shape, dtype, given), given.state.clone()
        with without_autocast(sequence.device.type):
            y, state = entry.run(widened(given) if entry.widen else given)
        # `to` costs time at every call, even if the dtype is already right
        return y if y.dtype == dtype else y.to(dtype), state


def zeros_of(shape: Sequence[int], dtype: torch.dtype, inputs: tuple[Any, ...]) -> Tensor:
    """Return zeros that depend on all tensors among the inputs, so that each of them gets a gradient."""
    tensors = [x for x in leaves(inputs) if x.dtype != torch.bool]
    zeros = torch.zeros(shape, dtype=dtype, device=tensors[0].device)
    for x in tensors:
        zeros = zeros + x.flatten()[:0].sum().real.to(dtype)
    return zeros


@runtime_checkable
class Public(Protocol[P, R_co]):
    """The public function of an operator.

    Attributes:
        operator: the operator that the function calls.
        empty_state: the operator's method `empty_state`.
    """

    operator: Operator[Any]
    empty_state: Callable[..., Any]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Run the operator."""


def documented(operator: Operator[Any]) -> Callable[[Callable[P, R_co]], Public[P, R_co]]:
    """Return a decorator for the public function of an operator.

    The function gets the attributes `operator` and `empty_state`, and in its docstring `{backends}` is
    replaced by the operator's table.
    """

    def decorate(function: Callable[P, R_co]) -> Public[P, R_co]:
        if function.__doc__ is not None:
            function.__doc__ = function.__doc__.replace("{backends}", table(operator.backends))
        public = cast(Public[P, R_co], function)
        public.operator, public.empty_state = operator, operator.empty_state
        return public

    return decorate


class Call(NamedTuple):
    """A public call, after checks and the choice of the backend.

    Attributes:
        operator: the operator.
        inputs: its canonical inputs, a named tuple.
        backend: the entry of the table that runs.
    """

    operator: Operator[Any]
    inputs: Any
    backend: Backend[Any]


Handler = Callable[[Call, Callable[[], Result]], Result]
"""A function of a call and of a continuation that runs it; it returns the result of the call."""

_HANDLERS: Ambient[tuple[Handler, ...]] = Ambient("handlers", ())


def handled() -> bool:
    """Return whether the calls of this thread have handlers."""
    return bool(_HANDLERS.get())


class TimeSplit(ABC):
    """A handler that runs calls on this process's segment of every sequence.

    Attributes:
        operators: names of the operators that it supports. Operators composed of others pass through to their
            inner calls, and all other operators run on one process after another.
    """

    operators: tuple[str, ...] = ()

    @abstractmethod
    def run(self, call: Call) -> Result:
        """Run a call of a supported operator."""

    @abstractmethod
    def halo(self, x: Tensor, state: Tensor, reset: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the n inputs before this process's steps, and the last n inputs of the whole sequence.

        Args:
            x: this process's inputs (b, t, c).
            state: the n inputs before the sequence (b, n, c).
            reset: None or (b, t).
        """

    @abstractmethod
    def in_turn(
        self, name: str, run: Callable[[Tree], tuple[Any, Tree]], state: Tree, given: Iterable[Any]
    ) -> tuple[Any, Tree]:
        """Run a function of the state on one process after another; see `in_turn`."""

    def __call__(self, call: Call, proceed: Callable[[], Result]) -> Result:
        """Run the call, or pass through to its inner calls."""
        operator, inputs = call.operator, call.inputs
        if not getattr(inputs, "causal", True):
            refuse_split_time(operator.name)
        if operator.name in self.operators:
            return self.run(call)
        if operator.composed:
            return proceed()
        state = inputs.state
        if state is None and operator.state is not None:
            shape, dtype = operator.state(inputs)
            state = getattr(inputs, operator.sequence).new_zeros(shape, dtype=dtype)

        def run(state: Tree) -> Result:
            return operator.run(inputs._replace(state=state), call.backend)

        return self.in_turn(operator.name, run, state, leaves(tuple(inputs)))


def time_split() -> TimeSplit | None:
    """Return the handler that splits sequences over processes; None if they are whole."""
    return next((handler for handler in _HANDLERS.get() if isinstance(handler, TimeSplit)), None)


def time_is_split() -> bool:
    """Return whether sequences are split over processes."""
    return time_split() is not None


def in_turn(
    name: str, run: Callable[[Tree], tuple[Any, Tree]], state: Tree, given: Iterable[Any]
) -> tuple[Any, Tree]:
    """Return `run(state)`; if time is split, run it on one process after another.

    Args:
        name: the function's name, for errors.
        run: returns the outputs of this process's steps and the state after them, from the state before them.
        state: the state before the whole sequence, as `run` takes it, with at least one tensor.
        given: the other tensors that `run` depends on, apart from parameters.
    """
    split = time_split()
    return run(state) if split is None else split.in_turn(name, run, state, given)


def refuse_split_time(name: str) -> None:
    """Raise if time is split, for functions that need all steps of a sequence at once.

    Args:
        name: the function's name, for the error.
    """
    if time_is_split():
        raise ValueError(
            f"`{name}` needs all steps of a sequence in one process; `time_parallel` gives each a segment. "
            "Use causal mixers, or split the batch over processes instead."
        )


@contextlib.contextmanager
def handling(handler: Handler, *, compiled: bool = True) -> Iterator[None]:
    """Send every call of this thread within the context to the handler.

    Args:
        handler: asked before the handlers of contexts around this one.
        compiled: whether compiled calls must be sent too; see `Ambient`.
    """
    with _HANDLERS.set((*_HANDLERS.get(), handler), compiled=compiled):
        yield


def unhandled() -> contextlib.AbstractContextManager[Any]:
    """Run the calls of this thread within the context without handlers."""
    # a call with handlers is a graph break, so the calls of a graph run without handlers
    return contextlib.nullcontext() if is_compiling() else _HANDLERS.set((), compiled=False)


@contextlib.contextmanager
def recording() -> Iterator[list[Call]]:
    """Record the calls of operators in this thread, without the calls that operators make themselves.

    Calls of compiled functions are not recorded.
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

    try:
        with handling(record, compiled=False):
            yield calls
    finally:
        # a checkpoint that ran within the context may run again later, within a copy of the context
        depth = 1
