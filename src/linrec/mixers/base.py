"""The interface of all time mixers."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from linrec.ops.gate_loop import gate_loop_matrix
from linrec.precision import Float32Module

__all__ = ["Mixer", "State", "Transitions"]

# a tensor, a (named) tuple of states, or None
State: TypeAlias = Any
M = TypeVar("M", bound="Mixer")


class Transitions(NamedTuple):
    """What the state of a mixer is multiplied by: a = magnitude * exp(i phase), per step and channel.

    Args:
        magnitude: |a|, shape (b, t, c), or (c,) where it is the same at every step.
        phase: arg a in radians, shape (b, t, c) or (c,); None where a is real.
    """

    magnitude: Float[Tensor, "*bt c"]
    phase: Float[Tensor, "*bt c"] | None

    @classmethod
    def of_heads(
        cls, log_decay: Float[Tensor, "*bt h dk"], phase: Float[Tensor, "*bt h dk"] | None
    ) -> "Transitions":
        """Return the transitions of an operator's `log_decay` and `phase`, the heads side by side."""
        return cls(log_decay.exp().flatten(-2), None if phase is None else phase.flatten(-2))


class Mixer(Float32Module, ABC):
    """Maps a sequence to a sequence, causally, carrying a state: (x, state) -> (y, state).

    A subclass is one paper's layer. Its configuration is the keyword-only arguments of its `__init__`; it
    has `forward`, `init_state` and `state_size`, and needs nothing else. `linrec.testing.check_mixer` checks
    that what it says here holds.

    Args:
        d_model: width of the sequence, in and out.

    Example:
        >>> import torch
        >>> from linrec import mixers
        >>> mixer = mixers.build("gate_loop", 8)
        >>> y, state = mixer(torch.zeros(2, 5, 8))
        >>> y, state = mixer(torch.zeros(2, 1, 8), state)
        >>> y.shape
        torch.Size([2, 1, 8])
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        if d_model < 1:
            raise ValueError(f"`d_model` must be at least 1; got {d_model}.")
        self.d_model = d_model
        # sequences, and how a state for them is made: streams check the same one at every step
        self._state_form: tuple[int, State] | None = None

    @abstractmethod
    def forward(
        self,
        x: Float[Tensor, "b t d_model"],
        state: State = None,
        *,
        reset: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t d_model"], State]:
        """Mix `x` over time.

        Args:
            x: (b, t, d_model), any t, zero and one included.
            state: what an earlier call returned, None at the start of a sequence.
            reset: (b, t) bool, true where a new sequence starts: nothing before that step reaches it.

        Returns:
            y (b, t, d_model) and the state after the last step.
        """

    @abstractmethod
    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> State:
        """The state at the start of `batch` sequences; passing it is the same as passing None.

        Args:
            batch: sequences b.
            device: where the state lives; None is where the parameters live.
        """

    @property
    @abstractmethod
    def state_size(self) -> int:
        """Elements of the state per sequence; where the state grows with time, elements per step kept."""

    def transitions(self, x: Float[Tensor, "b t d_model"]) -> Transitions | None:
        """What the state is multiplied by at each step, per channel, for inspection.

        Args:
            x: what `forward` takes, (b, t, d_model).

        Returns:
            Magnitudes and phases, in float32 or better; None, unless the mixer multiplies its state.
        """
        return None

    def token_mixing(
        self, x: Float[Tensor, "b t d_model"], *, reset: Bool[Tensor, "b t"] | None = None
    ) -> Float[Tensor, "b t t"] | None:
        """How much of step m is in step n, on average over channels or heads, for inspection.

        Args:
            x: what `forward` takes, (b, t, d_model).
            reset: what `forward` takes, (b, t) bool.

        Returns:
            Lower triangular matrices of numbers >= 0 whose entry (n, m) is the mean magnitude of the weight
            with which step m reaches step n; None where the mixer has no such matrix.
        """
        return None

    @classmethod
    def share(cls: type[M], layers: Sequence[M]) -> None:
        """Give the mixers of a stack what belongs to them together; nothing, unless their paper has such.

        A model calls this once, when its layers exist. What is shared is a module that every mixer holds, so
        that each layer still runs alone and nothing more is passed to `forward`.

        Args:
            layers: the mixers of this class, first layer first.
        """

    def extra_repr(self) -> str:
        """What `print(mixer)` shows beside the submodules."""
        return f"d_model={self.d_model}, state_size={self.state_size}"

    def check_input(self, x: Tensor, reset: Tensor | None = None, state: State = None) -> None:
        """Refuse what `forward` does not take, in the caller's words rather than a matmul's.

        Args:
            x: must be (batch, time, d_model).
            reset: must be (batch, time) bool, or None. Other shapes would broadcast, and reset other steps.
            state: must have the structure and the sizes of `init_state`, for as many sequences as `x`, or be
                None. What starts empty may have grown.
        """
        if x.dim() != 3 or x.shape[-1] != self.d_model:
            raise ValueError(
                f"`x` must have shape (batch, time, d_model) = (batch, time, {self.d_model}); "
                f"got {tuple(x.shape)}. A single step is a sequence of length 1."
            )
        if not x.is_floating_point():
            raise TypeError(f"`x` must be of a real floating dtype; got {x.dtype}. Embed tokens first.")
        if reset is not None and reset.shape != x.shape[:2]:
            raise ValueError(
                f"`reset` must have shape (batch, time) = {tuple(x.shape[:2])}; got {tuple(reset.shape)}. "
                "Pass one flag per sequence and step."
            )
        if reset is not None and reset.dtype != torch.bool:
            raise TypeError(f"`reset` must be bool; got {reset.dtype}. Pass `reset != 0`.")
        # in a graph, the state to compare with would be one of its steps
        if state is not None and not torch.compiler.is_compiling():
            if self._state_form is None or self._state_form[0] != len(x):
                self._state_form = len(x), self.init_state(len(x), device="meta")
            _check_state(type(self).__name__, state, self._state_form[1])

    def _state_dtype(self) -> torch.dtype:
        return torch.promote_types(next(self.parameters()).dtype, torch.float32)


def _check_state(name: str, state: State, start: State) -> None:
    """Raise unless `state` is made as `start` is, what `init_state` returns."""
    if _fits(state, start):
        return
    raise ValueError(
        f"`state` must be that of {name} for these rows, {_form(start)}, where sizes of 0 may have grown; "
        f"got {_form(state)}. Pass what the previous call of this layer returned, or None."
    )


def _fits(state: State, start: State) -> bool:
    if start is None:
        # a cache may hold more than it starts with
        return state is None or isinstance(state, Tensor)
    if isinstance(start, Tensor):
        if state is None:
            # as of a cache of no steps
            return start.numel() == 0
        if not isinstance(state, Tensor) or state.dim() != start.dim():
            return False
        # rows never grow, not even from none
        return len(state) == len(start) and all(
            size in (found, 0) for found, size in zip(state.shape[1:], start.shape[1:], strict=True)
        )
    return (
        type(state) is type(start)
        and len(state) == len(start)
        and all(_fits(part, of_start) for part, of_start in zip(state, start, strict=True))
    )


def _form(state: State) -> str:
    """Structure and sizes of a state, as an error shows them."""
    if isinstance(state, Tensor):
        return f"a tensor {tuple(state.shape)}"
    if isinstance(state, tuple):
        name = "" if type(state) is tuple else type(state).__name__
        return f"{name}({', '.join(_form(part) for part in state)})"
    return "None" if state is None else f"a {type(state).__name__}"


def elementwise_mixing(
    magnitude: Float[Tensor, "*bt c"],
    gate: Float[Tensor, "*bt c"],
    x: Float[Tensor, "b t d_model"],
    reset: Bool[Tensor, "b t"] | None,
) -> Float[Tensor, "b t t"]:
    """W_nm = mean_c gate_mc prod_{j=m+1..n} |a_jc|: `token_mixing` of h_n = a_n h_{n-1} + gate_n c_n.

    Args:
        magnitude: |a|, (b, t, c) or (c,).
        gate: factor >= 0 of the input, (b, t, c) or (c,).
        x: the mixer's input, which says b and t.
        reset: (b, t) bool, or None.

    Source:
        HGRN (Qin, Yang and Zhong, 2023), eq. 7, its matrix Lambda, which figure 4 shows.
    """
    keys = gate.expand(*x.shape[:2], -1)[:, :, None]
    mean = torch.full_like(keys, 1 / keys.shape[-1])
    return gate_loop_matrix(mean, keys, magnitude.log()[..., None, :], reset=reset)[:, 0]


def kernel_mixing(
    kernel: Float[Tensor, "c t"],
    x: Float[Tensor, "b t d_model"],
    reset: Bool[Tensor, "b t"] | None,
    weights: Float[Tensor, "b c t t"] | None = None,
) -> Float[Tensor, "b t t"]:
    """W_nm = mean_c |K_c,n-m g_c,nm|: `token_mixing` of a convolution with the kernel K.

    Args:
        kernel: K (c, t), the tap of the current step first.
        x: the mixer's input, which says b and t.
        reset: (b, t) bool, or None.
        weights: g, what the pairs of steps are multiplied by beside; None is one.
    """
    batch, time, _ = x.shape
    steps = torch.arange(time, device=x.device)
    apart = steps[:, None] - steps
    seen = (apart >= 0).expand(batch, time, time)
    if reset is not None:
        document = reset.cumsum(1)
        seen = seen & (document[:, :, None] == document[:, None])
    if weights is None:
        return kernel.abs().mean(0)[apart.clamp(min=0)] * seen
    return (kernel[:, apart.clamp(min=0)] * weights).abs().mean(1) * seen


def heads_of(name: str, width: int, n_heads: int) -> int:
    """Channels per head of a `width` split over `n_heads`, or the error that says which argument is wrong."""
    if n_heads < 1 or width < 1 or width % n_heads:
        raise ValueError(
            f"`{name}` must be a positive multiple of `n_heads` = {n_heads}; got {width}. "
            "Pass an `n_heads` that divides it."
        )
    return width // n_heads


def most_heads(width: int, channels: int) -> int:
    """Largest number of heads that divides `width` and leaves each at least `channels`, or 1."""
    most = max(1, width // channels)
    return next(heads for heads in range(most, 0, -1) if width % heads == 0)
