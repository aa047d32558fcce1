"""The interface of all time mixers."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import Context
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar, get_type_hints

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from linrec.literals import TAKES_DT
from linrec.nn.parameters import Float32Module, tensor_options
from linrec.ops import inspection
from linrec.ops.core.call import Call, in_turn, recording, refuse_split_time, time_is_split
from linrec.ops.core.checks import visible
from linrec.rules import at_least, typed
from linrec.trees import leaves, map_tree

__all__ = ["Mixer", "State", "Transitions", "Values"]

# a tensor, a (named) tuple of states, or None
State: TypeAlias = Any
Values: TypeAlias = tuple[Tensor, ...]
"""The values of the first layer of a stack (b, t, ...), or nothing in the first layer itself."""
M = TypeVar("M", bound="Mixer")


class Transitions(NamedTuple):
    """The factors of a mixer's state, a = magnitude * exp(i phase), per step and channel.

    Args:
        magnitude: |a|, shape (b, t, c), or (c,) where it is the same at every step.
        phase: arg a in radians, shape (b, t, c) or (c,); None where a is real.
    """

    magnitude: Float[Tensor, "*bt c"]
    phase: Float[Tensor, "*bt c"] | None

    @classmethod
    def ones(cls, channels: int, **factory: Any) -> "Transitions":
        """Return the factors of a state that does not decay, in the dtype and on the device given."""
        return cls(torch.ones(channels, **factory), None)


class Mixer(Float32Module):
    """Map a sequence to a sequence causally, with a state: (x, state) -> (y, state).

    A subclass is one paper's layer. Its configuration is the keyword-only arguments of its `__init__`. It has
    `mix`, with the paper's equations in their order; nothing else is needed. A subclass may define `forward`
    in place of `mix`. `linrec.testing.check_mixer` checks every promise made here.

    Inspection reads the operator call that is the mixer's memory. `recurrence` names the operator, and
    `transitions` and `token_mixing` run the mixer once and look at that call. A mixer that calls several
    operators, or whose paper's gates say more, overrides them.

    Args:
        d_model: width of the sequence, in and out.

    Attributes:
        recurrence: the operator of `linrec.ops` whose last call in `mix` is the memory; None, if there is no
            such call. An attribute of the class, or of the mixer where its arguments choose the operator.
        of_one_input: names of the layers that `mix` passes to `linrec.nn.projections.projected` together.
            Generation joins their weights.
        segment_length: steps of a segment, for a mixer with a memory that changes at multiples of this number
            of steps, counted over resets; None for other mixers. `init_state` then takes `position`, the step
            of the stream at which the state starts, and `state_size` counts the largest state.
        takes_dt: whether steps may be irregular. `mix` then has a last argument `dt`, None by default.
        takes_values: whether layers of a stack read the values of the first layer. `forward` then has an
            argument `values`, None by default. With values, it returns (state, values) for the state.
        own_norm: whether the mixer normalises its input itself, because it reads the unnormalised input too.
            A pre-norm block then leaves out the norm before the mixer.
        own_dropout: whether the mixer drops channels of its output itself. A block then leaves out its
            dropout of this output.
        takes_turns: whether `mix` reads other steps by itself, not by operators alone. `time_parallel` then
            runs the mixer in one process after another. An attribute of the class or of the mixer.

    Example:
        >>> import torch
        >>> from linrec import mixers
        >>> mixer = mixers.build("gate_loop", 8)
        >>> y, state = mixer(torch.zeros(2, 5, 8))
        >>> y, state = mixer(torch.zeros(2, 1, 8), state)
        >>> y.shape
        torch.Size([2, 1, 8])
    """

    recurrence: str | None = None
    of_one_input: tuple[str, ...] = ()
    takes_dt: bool = False
    takes_values: bool = False
    own_norm: bool = False
    own_dropout: bool = False
    takes_turns: bool = False
    segment_length: int | None = None
    # returns a mixer of the same arguments; None while `init_state` runs zero steps
    _make_again: Callable[[], "Mixer"] | None

    def __new__(cls: type[M], *args: Any, **arguments: Any) -> M:
        """Check the arguments against the annotations of `__init__`, before it reads them."""
        start = cls.__init__
        hints = start.__annotations__
        if any(isinstance(hint, str) for hint in hints.values()):
            # of a file with `from __future__ import annotations`, which may name types of type checkers alone
            with suppress(NameError):
                hints = get_type_hints(start)
        # copies are made without arguments
        typed(hints, **signature(start).bind_partial(None, *args, **arguments).arguments)
        mixer = super().__new__(cls)
        vars(mixer)["_make_again"] = partial(cls, *args, **arguments)
        return mixer

    def __init__(self, d_model: int) -> None:
        super().__init__()
        at_least(1, d_model=d_model)
        self.d_model = d_model
        # batch and precision of the last call with a state, and the `init_state` that checked that state
        self._start: tuple[tuple[Any, ...], State] | None = None
        # dtype of the parameters, and the state of one row after zero steps, on "meta"
        self._zero_steps: tuple[torch.dtype, State] | None = None

    def forward(
        self,
        x: Float[Tensor, "b t d_model"],
        state: State = None,
        *,
        reset: Bool[Tensor, "b t"] | None = None,
        dt: Float[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t d_model"], State]:
        """Check the inputs, and mix `x` over time.

        Args:
            x: (b, t, d_model), any t, zero and one included.
            state: the state that an earlier call returned; None at the start of a sequence. A state of
                another precision, as of the model before `.bfloat16()`, is cast, but in compiled programs.
            reset: (b, t) bool, true where a new sequence starts: nothing before that step reaches it.
            dt: (b, t), positive: the time since the previous step of the row, and at the first step since the
                state was left. 1 is the length of a regular step, and None means 1. Only for mixers with
                `takes_dt`. Values are checked on the CPU only, because reading them would wait for a device.

        Returns:
            y (b, t, d_model) and the state after the last step.
        """
        return self.checked(x, state, reset, **({} if dt is None else {"dt": dt}))

    if TYPE_CHECKING:
        __call__ = forward

    def checked(
        self, x: Tensor, state: State, reset: Tensor | None, dt: Tensor | None = None, **arguments: Any
    ) -> tuple[Tensor, State]:
        """Check the inputs, and return what `mix` returns; `arguments` are its further arguments."""
        self.check_input(x, reset, dt)
        self.check_causal(state)
        # within a graph, `init_state` would become a part of it
        if state is not None and not torch.compiler.is_compiling():
            state = _cast(state, self._start_of(x, state))
        # the name of the times is each mixer's own
        times = () if dt is None else (dt,)
        mix: Callable[..., tuple[Tensor, State]] = self.mix
        if time_is_split() and (self.takes_turns or not self.is_causal):
            given = [x, *times, *arguments.values()]
            return self._mix_in_turn(lambda state: mix(x, state, reset, *times, **arguments), state, given)
        return checked_output(self, mix(x, state, reset, *times, **arguments), x)

    def _mix_in_turn(
        self, mix: Callable[[State], tuple[Tensor, State]], state: State, given: Sequence[Tensor]
    ) -> tuple[Tensor, State]:
        """Run `mix`, which reads the given tensors, in one process after another."""
        name, x = type(self).__module__.rpartition(".")[2], given[0]
        if not self.is_causal:
            refuse_split_time(name)
        state = self.init_state(x.shape[0], device=x.device) if state is None else state
        return checked_output(self, in_turn(name, mix, state, [*given, *self.parameters()]), x)

    def check_causal(self, state: State) -> None:
        """Raise ValueError for a state of a mixer that sees later steps."""
        if state is not None and not self.is_causal:
            raise ValueError(
                f"`state` must be None for {type(self).__name__}, whose outputs depend on later steps, so "
                f"that a sequence cannot be run in pieces; got {type(state).__name__}. Pass it whole."
            )

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y (b, t, d_model) and the state after the last step; `forward` has checked the inputs."""
        raise NotImplementedError(
            f"{type(self).__name__} must define `mix(x, state, reset)`, which returns (y, state)."
        )

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> State:
        """Return the state at the start of `batch` sequences; passing it is the same as passing None.

        These are zeros in the shapes of the state that a new mixer returns after zero steps. A mixer defines
        the method if its state starts from other numbers, if the dtype depends on autocast, if `mix` calls
        the method, or if a part of the mixer may be replaced by a part with another state.

        Args:
            batch: sequences b.
            device: where the state lives; None is where the parameters live.
        """
        device = tensor_options(self, device)["device"]

        def zeros(of_row: Tensor) -> Tensor:
            return torch.zeros(batch, *of_row.shape[1:], dtype=of_row.dtype, device=device)

        return map_tree(zeros, self._state_of_a_row())

    def _state_of_a_row(self) -> State:
        """Return a state of one row, in the shapes and dtypes of the first."""
        # some parameters of a mixer in half precision are in float32
        dtypes = {weight.dtype for weight in self.parameters() if weight.is_floating_point()}
        dtype = min(dtypes, key=lambda each: each.itemsize, default=torch.get_default_dtype())
        if self._zero_steps is None or self._zero_steps[0] != dtype:
            if torch.compiler.is_compiling():
                # compilers drop the call, whose shapes alone are read
                with torch.no_grad():
                    return self(torch.zeros(1, 0, self.d_model, **tensor_options(self) | {"dtype": dtype}))[1]
            # in a context of its own, so that nothing records or splits the calls
            self._zero_steps = dtype, Context().run(self._after_zero_steps, dtype)
        return self._zero_steps[1]

    @torch.no_grad()
    def _after_zero_steps(self, dtype: torch.dtype) -> State:
        """Return the state of one row after zero steps of a new mixer on "meta"."""
        if self._make_again is None:
            raise TypeError(f"{type(self).__name__} must define `init_state`, because `mix` calls it.")
        # a new mixer, because layers of this one may be sharded, offloaded, hooked or replaced
        with torch.device("meta"):
            try:
                mixer = self._make_again().to(dtype)
                mixer._make_again = None
                return mixer(torch.zeros(1, 0, self.d_model, dtype=dtype))[1]
            except Exception as error:
                raise TypeError(
                    f'{type(self).__name__} must define `init_state`, because a new mixer on "meta" '
                    f"fails: {error}"
                ) from error

    @property
    def state_size(self) -> int:
        """Elements of the state per sequence; where the state grows with time, elements per step kept."""
        return sum(tensor.numel() for tensor in leaves(self.init_state(1, device="meta")))

    @property
    def state_grows(self) -> bool:
        """Whether each step makes the state larger, as a cache that starts without steps, without a window.

        The states of mixers with segments are bounded. A state that grows up to a length counts as growing.
        """
        start = leaves(self.init_state(1, device="meta"))
        return self.segment_length is None and any(not tensor.numel() for tensor in start)

    @property
    def is_causal(self) -> bool:
        """Whether no step depends on later steps; a class or its arguments say so where a step does.

        `linrec train` and `linrec.testing.check_mixer` check it. A causal mixer without a state, which sees a
        step alone, has None as its state.
        """
        return True

    def factory_kwargs(
        self, device: torch.device | str | None = None, *, is_complex: bool = False
    ) -> dict[str, Any]:
        """Return the dtype and the device of a new state, for `init_state`.

        The dtype is float32, or float64 where the parameters are; the complex dtype of that precision with
        `is_complex`. No values of parameters are read.
        """
        # `promote_types`, because `torch.compile` cannot trace `to_complex`
        dtype = torch.promote_types(self.state_dtype, torch.complex64) if is_complex else self.state_dtype
        return tensor_options(self, device) | {"dtype": dtype}

    def transitions(self, x: Float[Tensor, "b t d_model"]) -> Transitions | None:
        """Return the factors of the state at each step, per channel, for inspection.

        Args:
            x: the input of `forward`, (b, t, d_model).

        Returns:
            Magnitudes and phases, in float32 or better; None, unless the mixer multiplies its state.
        """
        found = inspection.transitions(*self._memory(x, None))
        return None if found is None else Transitions(*found)

    def token_mixing(
        self, x: Float[Tensor, "b t d_model"], *, reset: Bool[Tensor, "b t"] | None = None
    ) -> Float[Tensor, "b t t"] | None:
        """Return how much of step m is in step n, on average over channels or heads, for inspection.

        Args:
            x: the input of `forward`, (b, t, d_model).
            reset: the resets of `forward`, (b, t) bool.

        Returns:
            Lower triangular matrices of numbers >= 0 whose entry (n, m) is the mean magnitude of the weight
            with which step m reaches step n; None where the mixer has no such matrix.
        """
        return inspection.token_mixing(*self._memory(x, reset))

    def _memory(self, x: Tensor, reset: Tensor | None) -> tuple[Call | None, dict[str, Tensor]]:
        """Run the mixer, and return the last call of `recurrence` and the values that the mixer noted."""
        if self.recurrence is None:
            return None, {}
        with recording() as calls, inspection.noting() as notes:
            # the call operator would run hooks, such as the one that inspects
            self.forward(x, reset=reset)
        found = [call for call in calls if call.operator.name == self.recurrence]
        return (found[-1] if found else None), notes

    @classmethod
    def share(cls: type[M], layers: Sequence[M]) -> None:
        """Give the mixers of a stack the modules that they share; do nothing, unless the paper shares any.

        A model calls this once, when its layers exist. Every mixer holds the shared module, so that each
        layer still runs alone, and `forward` needs no further arguments.

        Args:
            layers: the mixers of this class, first layer first.
        """

    def place(self, layer: int, n_layers: int) -> None:
        """Set initial values for layer `layer` of a stack; do nothing, unless the paper's depend on it.

        A model calls this once, when its layers exist.

        Args:
            layer: position in the stack, counted from 0 over the blocks of all kinds.
            n_layers: blocks of the stack, of all kinds.
        """

    def extra_repr(self) -> str:
        """Return the text that `print` shows."""
        return f"d_model={self.d_model}, state_size={self.state_size}"

    def check_input(self, x: Tensor, reset: Tensor | None = None, dt: Tensor | None = None) -> None:
        """Raise an error for inputs that `forward` does not take.

        Args:
            x: must be (batch, time, d_model).
            reset: must be (batch, time) bool, or None. Other shapes would broadcast, and reset other steps.
            dt: must be (batch, time) of a real floating dtype, or None; None for mixers without `takes_dt`.
        """
        if not isinstance(x, Tensor):
            raise _no_tensor("x", x)
        if x.dim() != 3 or x.shape[-1] != self.d_model:
            raise ValueError(
                f"`x` must have shape (batch, time, d_model) = (batch, time, {self.d_model}); "
                f"got {tuple(x.shape)}. A single step is a sequence of length 1."
            )
        if not x.is_floating_point():
            raise TypeError(f"`x` must be of a real floating dtype; got {x.dtype}. Embed tokens first.")
        if x.dtype == torch.float64 != (weights := next(self.parameters(), x).dtype):
            raise TypeError(
                f"`x` must have the dtype of the weights of {type(self).__name__}, {weights}; got {x.dtype}. "
                f"Pass `x.to({weights})`, or call `.double()` of the mixer."
            )
        if reset is not None and not isinstance(reset, Tensor):
            raise _no_tensor("reset", reset)
        if reset is not None and reset.shape != x.shape[:2]:
            raise ValueError(
                f"`reset` must have shape (batch, time) = {tuple(x.shape[:2])}; got {tuple(reset.shape)}. "
                "Pass one flag per sequence and step."
            )
        if reset is not None and reset.dtype != torch.bool:
            raise TypeError(f"`reset` must be bool; got {reset.dtype}. Pass `reset != 0`.")
        if dt is not None:
            self._check_dt(dt, x)

    def _check_dt(self, dt: Tensor, x: Tensor) -> None:
        """Raise unless the mixer takes times, and `dt` are real numbers, one per sequence and step."""
        if not self.takes_dt:
            raise TypeError(
                f"`dt` must be None for {type(self).__name__}, whose steps have equal lengths; got a tensor. "
                f"Use a mixer that takes times ({', '.join(TAKES_DT)}), or make the time a feature of `x`."
            )
        if not isinstance(dt, Tensor):
            raise _no_tensor("dt", dt)
        if dt.shape != x.shape[:2]:
            raise ValueError(
                f"`dt` must have shape (batch, time) = {tuple(x.shape[:2])}; got {tuple(dt.shape)}. "
                "Pass the time since the previous step, per sequence and step."
            )
        if not dt.is_floating_point():
            raise TypeError(f"`dt` must be of a real floating dtype; got {dt.dtype}. Pass `dt.float()`.")
        # 0 stands in padding; the smallest of numbers and NaN is NaN
        if dt.numel() and visible(dt) and not (least := float(dt.detach().min())) >= 0:
            raise ValueError(
                f"`dt` must be positive; got values down to {least:.4g}. Pass the time since the previous "
                "step, with steps in the order of time."
            )

    def _start_of(self, x: Tensor, state: State) -> State:
        """Return a start in the dtypes of states of `x`; raise ValueError for a state of other sizes.

        Caches that start empty may have grown.
        """
        # autocast has an influence on the dtype of caches; "meta" has no autocast
        kind = x.device.type
        cast = kind != "meta" and torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        call = len(x), x.dtype, cast
        # streams check the same structure at every step
        known = self._start
        if known is not None and known[0] == call and fits(state, known[1]):
            return known[1]
        # made again for another call, or after a part of the mixer was replaced
        start = self.init_state(len(x), device="meta")
        if not is_state(start):
            raise TypeError(
                f"`init_state` of {type(self).__name__} must return a tensor, None, or a tuple of such; got "
                f"{_form(start)}."
            )
        start = _cast(start, self.init_state(0, device=x.device))
        self._start = call, start
        if not fits(state, start):
            raise ValueError(
                f"`state` must be that of {type(self).__name__} for these rows, {_form(start)}, where sizes "
                f"of 0 may have grown; got {_form(state)}. Pass the state of the previous call, or None."
            )
        return start


def checked_output(mixer: nn.Module, result: Any, x: Tensor) -> tuple[Tensor, State]:
    """Return (y, state) of a mixer; raise unless y is a tensor of the shape of x: others might broadcast."""
    # within a graph, shapes of an output would become conditions
    if torch.compiler.is_compiling():
        return result
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor)):
        raise TypeError(f"{type(mixer).__name__} must return (y, state), y a tensor; got {_form(result)}.")
    if result[0].shape != x.shape:
        raise ValueError(
            f"y of {type(mixer).__name__} must have the shape of `x`, {tuple(x.shape)}; got "
            f"{tuple(result[0].shape)}."
        )
    return result


def _no_tensor(name: str, value: object) -> TypeError:
    return TypeError(
        f"`{name}` must be a tensor; got a value of type {type(value).__name__}. Pass "
        f"`torch.as_tensor({name})`."
    )


def is_state(state: Any) -> bool:
    """Return whether a state is a tensor, None, or a tuple of states, which may be named."""
    if isinstance(state, tuple):
        return all(map(is_state, state))
    return state is None or isinstance(state, Tensor)


def fits(state: State, start: State) -> bool:
    """Return whether a state has the structure and the sizes of `start`, where sizes of 0 may have grown."""
    if start is None:
        # a cache may hold more than it starts with
        return state is None or isinstance(state, Tensor)
    if isinstance(start, Tensor):
        if state is None:
            # as of a cache of no steps
            return start.numel() == 0
        if not isinstance(state, Tensor):
            return False
        found, expected = state.shape, start.shape
        # the number of rows never grows, not even from 0
        return found == expected or (
            len(found) == len(expected)
            and found[:1] == expected[:1]
            and all(size in (n, 0) for n, size in zip(found[1:], expected[1:], strict=True))
        )
    same = isinstance(start, tuple) and type(state) is type(start) and len(state) == len(start)
    return same and all(map(fits, state, start))


def _cast(state: State, start: State) -> State:
    """Return a state in the dtypes of another that fits; integers and flags stay as they are."""
    if isinstance(state, Tensor) and isinstance(start, Tensor):
        number = state.is_floating_point() or state.is_complex()
        return state.to(start.dtype) if number and state.is_complex() == start.is_complex() else state
    if isinstance(state, tuple) and isinstance(start, tuple):
        parts = (_cast(part, of) for part, of in zip(state, start, strict=True))
        return tuple(parts) if type(state) is tuple else type(state)(*parts)
    return state


def _form(state: State) -> str:
    """Structure and sizes of a state, as an error shows them."""
    if isinstance(state, Tensor):
        return f"a tensor {tuple(state.shape)}"
    if isinstance(state, tuple):
        name = "" if type(state) is tuple else type(state).__name__
        return f"{name}({', '.join(_form(part) for part in state)})"
    return "None" if state is None else f"a value of type {type(state).__name__}"
