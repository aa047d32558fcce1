"""Base class of mixers that cut sequences into segments, with a memory between the segments."""

from abc import abstractmethod

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from linrec.nn.mixer import Mixer, State
from linrec.nn.segments import Detach, Sight, by_segments, first_state
from linrec.trees import Tree

__all__ = ["SegmentMixer"]


class SegmentMixer(Mixer):
    """A mixer whose memory changes at multiples of `segment_length` steps.

    A subclass defines `read`, `write` and `start`, and calls `by_segments` in `mix`. See
    `linrec.nn.segments.by_segments` for resets, for the meaning of the three, and for `prepare`.

    Attributes:
        segment_length: steps of a segment.
        detach: where gradients through the memory stop.
    """

    segment_length: int
    detach: Detach

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
        self, x: Float[Tensor, "b t d"], state: State, reset: Bool[Tensor, "b t"] | None
    ) -> tuple[Tensor, State]:
        """Read all steps of `x` and write the memory at each boundary; arguments are those of `mix`."""
        return by_segments(
            # the name by which the mixer is found
            type(self).__module__.rpartition(".")[2],
            self.read,
            self.write,
            x,
            self.init_state(len(x), device=x.device) if state is None else state,
            length=self.segment_length,
            fresh=None if reset is None else self.start(len(x), x.device)[0],
            prepare=self.prepare,
            reset=reset,
            detach=self.detach,
        )

    def init_state(self, batch: int, *, device: torch.device | str | None = None, position: int = 0) -> State:
        """Return the state of sequences that start at step `position` of a stream."""
        memory, segment = self.start(batch, device)
        return first_state(memory, segment, length=self.segment_length, position=position)
