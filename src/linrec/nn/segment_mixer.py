"""Base class of mixers that cut sequences into segments, with a memory between the segments."""

from abc import abstractmethod

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from linrec.nn.mixer import Mixer, State
from linrec.nn.segments import Detach, SegmentState, Sight, by_segments, check_detach, first_state
from linrec.ops.attention import check_options
from linrec.rules import at_least
from linrec.trees import Tree, leaves

__all__ = ["SegmentMixer"]


class SegmentMixer(Mixer):
    """A mixer whose memory changes at multiples of `segment_length` steps.

    A subclass defines `read`, `write` and `start`, and calls `by_segments` in `mix`. See
    `linrec.nn.segments.by_segments` for resets, for the meaning of the three, and for `prepare`.

    Args:
        d_model: width of the sequence.
        segment_length: steps of a segment.
        detach: where gradients through the memory stop.
        dropout: probability that an attention weight is dropped, in training alone.

    Raises:
        ValueError: a number out of range, or an unknown `detach`.
    """

    segment_length: int

    def __init__(
        self, d_model: int, *, segment_length: int, detach: Detach = "never", dropout: float = 0.0
    ) -> None:
        super().__init__(d_model)
        check_options(None, dropout)
        check_detach(detach)
        at_least(1, segment_length=segment_length, cure="The memory changes after that many steps.")
        self.segment_length, self.detach, self.dropout = segment_length, detach, dropout

    @property
    def active_dropout(self) -> float:
        """Return `dropout` in training, and 0 otherwise."""
        return self.dropout if self.training else 0.0

    @abstractmethod
    def read(self, x: Tensor, memory: Tree, segment: Tree, sight: Sight) -> tuple[Tensor, Tree]:
        """Return the outputs of new steps of a segment, and the cached steps with the new steps appended."""

    @abstractmethod
    def write(self, memory: Tree, segment: Tree, alive: Bool[Tensor, "b t"]) -> Tree:
        """Return the memory after a segment."""

    def prepare(self, memory: Tree) -> Tree:
        """Return the memory with what both `read` and `write` take from it."""
        return memory

    @abstractmethod
    def start(self, batch: int, device: torch.device | str | None) -> tuple[Tree, Tree]:
        """Return the memory of sequences that start, tensors (b, n, ...), and no cached steps (b, 0, ...)."""

    def by_segments(
        self,
        x: Float[Tensor, "b t *d"],
        state: State,
        reset: Bool[Tensor, "b t"] | None,
        given: Float[Tensor, "b n *c"] | None = None,
    ) -> tuple[Tensor, State]:
        """Read all steps of `x` and write the memory at each boundary; other arguments are those of `mix`.

        Args:
            x: what `read` takes, for each step.
            state: the state that an earlier call returned, or None.
            reset: true where a new sequence starts.
            given: what `write` takes besides, an element for each boundary that `x` reaches.
        """
        return by_segments(
            # the name by which the mixer is found
            type(self).__module__.rpartition(".")[2],
            self.read,
            self.write,
            x,
            self.init_state(x.shape[0], device=x.device) if state is None else state,
            length=self.segment_length,
            fresh=None if reset is None else self.start(x.shape[0], x.device)[0],
            prepare=self.prepare,
            given=given,
            reset=reset,
            detach=self.detach,
        )

    def ends(self, y: Float[Tensor, "b t *d"], state: SegmentState) -> Float[Tensor, "b n *d"]:
        """Return the steps of `y` at which a segment ends, where the steps follow `state`."""
        return y[:, self.segment_length - 1 - state.alive.shape[1] :: self.segment_length]

    def init_state(self, batch: int, *, device: torch.device | str | None = None, position: int = 0) -> State:
        """Return the state of sequences that start at step `position` of a stream."""
        memory, segment = self.start(batch, device)
        return first_state(memory, segment, length=self.segment_length, position=position)

    @property
    def state_size(self) -> int:
        """Elements of the memory and of an unfinished segment of `segment_length` - 1 steps, its longest.

        Keys and values that the state holds in inference alone are not counted.
        """
        largest = self.init_state(1, device="meta", position=self.segment_length - 1)
        return sum(tensor.numel() for tensor in leaves(largest))
