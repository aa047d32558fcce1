"""Base class of memories that pass from segment to segment across a whole stack."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from linrec.mixers import State
from linrec.models.config import MemoryConfig
from linrec.nn.segments import Detach, SegmentState, run_segments
from linrec.ops.core.isolation import documents
from linrec.rules import require
from linrec.trees import Tree, leaves, map_tree

__all__ = ["Stack", "StackMemory", "States"]

States: TypeAlias = tuple[State, ...]


class Stack(NamedTuple):
    """The blocks and the last norm of a model.

    Attributes:
        run: (x, states of the blocks, reset, memory=None) -> (y, states), with a memory that the blocks read.
        start: (batch, position) -> states of the blocks for sequences that start at step `position`.
    """

    run: Callable[..., tuple[Tensor, States]]
    start: Callable[[int, int], States]


class StackMemory(nn.Module, ABC):
    """A memory across a stack, which the stack reads within a segment and which changes at its end.

    A subclass defines `read`, `finish`, `start` and `state_size`. The state is a `SegmentState`.

    Args:
        config: the memory's configuration.
    """

    def __init__(self, config: MemoryConfig) -> None:
        super().__init__()
        self.config = config

    @abstractmethod
    def read(
        self, x: Tensor, state: SegmentState, alive: Bool[Tensor, "b s"], reset: Tensor | None, stack: Stack
    ) -> tuple[Tensor, Tree, Tree]:
        """Return the outputs of new steps of one segment, the memory, and the cached steps of the segment.

        Args:
            x: embeddings of at least one step (b, t, d_model).
            state: the state before these steps.
            alive: which of the steps up to the last new step are of the row's current sequence (b, r + t).
            reset: resets of these steps (b, t), or None.
            stack: the blocks.
        """

    @abstractmethod
    def finish(self, state: SegmentState, stack: Stack) -> tuple[Tree, Tree]:
        """Return the next memory, and the cached steps of an empty segment."""

    @abstractmethod
    def start(self, batch: int, position: int, stack: Stack) -> tuple[Tree, Tree]:
        """Return the memory of sequences that start at step `position`, and their cached steps."""

    @property
    @abstractmethod
    def state_size(self) -> int:
        """Elements of the state per sequence, without the states of the blocks."""

    @property
    def detach(self) -> Detach:
        """Return the boundaries at which gradients through the memory stop, as in `MemoryConfig`."""
        return self.config.detach

    def forward(
        self,
        x: Float[Tensor, "b t d_model"],
        state: SegmentState | None,
        reset: Bool[Tensor, "b t"] | None,
        *,
        stack: Stack,
    ) -> tuple[Float[Tensor, "b t d_model"], SegmentState]:
        """Return the outputs of the stack at the steps of `x`, and the state after the last step.

        Args:
            x: embeddings of the tokens.
            state: the state that an earlier call returned, in any precision; None is `first_state`.
            reset: true where a new sequence starts: the initial memory takes the place of the memory.
            stack: the blocks.

        Raises:
            ValueError: `state` is not of this memory; or, in the encoder form, a call does not consist of
                whole segments or has a reset within a segment.
        """
        if state is None:
            state = self.first_state(len(x), 0, stack=stack)
        require(
            isinstance(state, SegmentState),
            "`state` must be the `SegmentState` that this model returned, or None; got a "
            f"{type(state).__name__}.",
        )
        return run_segments(
            self.config.kind,
            partial(self._piece, stack=stack),
            partial(self.finish, stack=stack),
            x,
            state,
            length=self.config.segment_length,
            reset=reset,
            detach=self.detach,
            recompute=self.config.recompute,
        )

    if TYPE_CHECKING:
        __call__ = forward

    def first_state(self, batch: int, position: int, *, stack: Stack) -> SegmentState:
        """Return the state of `batch` sequences that start at step `position` of a stream."""
        dead = position % self.config.segment_length
        require(
            position >= 0 and not (dead and self.config.form == "encoder"),
            "`position` must be at least 0 and, with `form='encoder'`, a multiple of `segment_length` = "
            f"{self.config.segment_length}; got {position}.",
        )
        memory, segment = self.start(batch, position, stack)
        # the states of the blocks, if any, are on the device of the state
        device = leaves((segment, memory))[0].device
        memory, segment = map_tree(lambda part: part.to(device), (memory, segment))
        alive = torch.zeros(batch, dead, dtype=torch.bool, device=device)
        return SegmentState(memory, segment, alive, torch.full((batch,), position, device=device))

    def _piece(
        self, x: Tensor, state: SegmentState, reset: Tensor | None, stack: Stack
    ) -> tuple[Tensor, SegmentState]:
        """Read steps of one segment."""
        time = x.shape[1]
        if not time:
            return x, state
        if self.config.form == "encoder":
            self._check_whole(time, reset)
        if reset is None:
            alive = torch.cat([state.alive, state.alive.new_ones(len(x), time)], 1)
        else:
            document = documents(reset)
            # without a reset, the earlier steps of the segment stay in the current sequence
            before = state.alive & ~reset.any(1, keepdim=True)
            alive = torch.cat([before, document == document[:, -1:]], 1)
        y, memory, segment = self.read(x, state, alive, reset, stack)
        return y, SegmentState(memory, segment, alive, state.position + time)

    def _check_whole(self, time: int, reset: Tensor | None) -> None:
        """Raise ValueError unless the steps are a whole segment of one sequence."""
        length = self.config.segment_length
        require(
            time == length,
            f"a call with `form='encoder'` must have whole segments of `segment_length` = {length} steps; "
            f"got {time} steps of a segment. Pad the sequences, or use `form='decoder'`, which streams.",
        )
        require(
            reset is None or not reset[:, 1:].any(),
            f"`reset` must be true only at multiples of `segment_length` = {length} steps with "
            "`form='encoder'`; got a reset within a segment. Pad the sequences to whole segments.",
        )
