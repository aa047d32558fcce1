"""Mixers that cut sequences into segments, and a memory of the last steps before a segment."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn

from linrec.nn.mixer import Mixer, State
from linrec.nn.projections import projected
from linrec.nn.segments import Detach, SegmentState, Sight, by_segments, check_detach, first_state
from linrec.ops.attention import check_options
from linrec.rules import at_least
from linrec.trees import Tree, leaves, replaced

__all__ = [
    "PastSteps",
    "SegmentMixer",
    "Steps",
    "all_keys_and_values",
    "extended",
    "joined",
    "keeps_keys",
    "keys_and_values",
    "last_steps",
]

# steps of a segment (b, r, d), and `keys_and_values` of them
Steps: TypeAlias = tuple[Tensor, Tensor]


class PastSteps(NamedTuple):
    """The last m steps before a segment, oldest first; steps that do not exist are zeros and not alive.

    Attributes:
        h: a vector for each step (b, m, d).
        alive: whether a step is of the row's current sequence (b, m).
        kv: keys, then values, of each step (b, m, 2 w), as `keys_and_values` returns them; (b, m, 0) if they
            are not known.
    """

    h: Float[Tensor, "b m d"]
    alive: Bool[Tensor, "b m"]
    kv: Float[Tensor, "b m c"]

    @classmethod
    def of(cls, h: Float[Tensor, "b m d"], alive: Bool[Tensor, "b m"]) -> "PastSteps":
        """Return steps whose keys and values are not known."""
        return cls(h, alive, h.new_zeros(*h.shape[:2], 0))

    @classmethod
    def empty(cls, batch: int, length: int, width: int, **factory: Any) -> "PastSteps":
        """Return m = `length` steps that do not exist, in the dtype and on the device given."""
        h = torch.zeros(batch, length, width, **factory)
        return cls.of(h, torch.zeros(batch, length, dtype=torch.bool, device=h.device))

    def keyed(self, k: nn.Linear, v: nn.Linear, norm: nn.Module | None = None) -> "PastSteps":
        """Return the steps with their keys and values, or without them where gradients are recorded."""
        return replaced(self, kv=keys_and_values(self.h, self.kv, k, v, norm))

    def then(self, steps: "PastSteps") -> "PastSteps":
        """Return the last m steps after t more steps."""
        return PastSteps(*map(last_steps, self, steps))

    def evicting(self, steps: "PastSteps") -> tuple["PastSteps", "PastSteps"]:
        """Return the t steps that leave the memory, oldest first, and the memory after t more steps."""
        time, left = steps.h.shape[1], max(0, steps.h.shape[1] - self.h.shape[1])
        old = (joined(x[:, :time], y[:, :left]) for x, y in zip(self, steps, strict=True))
        return PastSteps(*old), self.then(steps)

    @property
    def no_steps(self) -> Steps:
        """Return the cached steps of an empty segment."""
        return self.h[:, :0], self.kv[:, :0]


def joined(old: Shaped[Tensor, "b m *d"], new: Shaped[Tensor, "b t *d"]) -> Shaped[Tensor, "b n *d"]:
    """Return [old | new], a copy in the dtype of new: a state from outside of autocast has another dtype."""
    return torch.cat([old.to(new.dtype), new], 1)


def last_steps(old: Shaped[Tensor, "b m *d"], new: Shaped[Tensor, "b t *d"]) -> Shaped[Tensor, "b m *d"]:
    """Return the last m steps of [old | new], as many as `old` has: a copy, in the dtype of new.

    A view would keep the memory of the other steps.
    """
    time = new.shape[1]
    return joined(old[:, time:], new[:, max(0, time - old.shape[1]) :])


def extended(
    segment: Steps, x: Float[Tensor, "b t d"], k: nn.Linear, v: nn.Linear, norm: nn.Module | None = None
) -> Steps:
    """Return the cached steps of a segment with new steps x behind them, in the dtype of the cached steps."""
    h = torch.cat([segment[0], x.to(segment[0].dtype)], 1)
    return h, keys_and_values(h, segment[1], k, v, norm)


def keeps_keys(layer: nn.Module) -> bool:
    """Return whether a state keeps keys and values: in evaluation mode, without gradients.

    Otherwise weights change between calls: each call takes keys and values from the weights that it has, and
    the gradients of W_k and W_v are whole.
    """
    return not (layer.training or torch.is_grad_enabled())


def keys_and_values(
    h: Float[Tensor, "b n d"],
    known: Float[Tensor, "b m c"],
    k: nn.Linear,
    v: nn.Linear,
    norm: nn.Module | None = None,
) -> Float[Tensor, "b n c"]:
    """Return [h W_k | h W_v] for a state, or a tensor of width 0 where it does not keep them.

    Args:
        h: the steps (b, n, d).
        known: the result for the first m steps, m <= n; of width 0 if it is not known.
        k: W_k.
        v: W_v.
        norm: norm of the steps before W_k and W_v; None disables it.
    """
    if not keeps_keys(k):
        return h.new_zeros(*h.shape[:2], 0)
    done = known.shape[1] if known.shape[2] else 0
    if 0 < done == h.shape[1]:
        return known
    new = torch.cat(projected(_normed(h[:, done:], norm), k, v), -1)
    return joined(known, new) if done else new


def all_keys_and_values(
    memories: Sequence[PastSteps],
    segment: Steps,
    k: nn.Linear,
    v: nn.Linear,
    norm: nn.Module | None = None,
) -> tuple[Float[Tensor, "b s w"], Float[Tensor, "b s w"]]:
    """Return keys and values of memories m_i and a segment h: [m_1 | m_2 | .. | h] W_k and W_v.

    Args:
        memories: memories with their keys and values, as `PastSteps.keyed` returns them, oldest first.
        segment: steps of the segment.
        k: W_k.
        v: W_v.
        norm: norm of the steps before W_k and W_v; None disables it.
    """
    h, kv = segment
    if not keeps_keys(k):
        h = torch.cat([*(memory.h for memory in memories), h], 1)
        keys, values = projected(_normed(h, norm), k, v)
    else:
        known = torch.cat([*(memory.kv.to(kv.dtype) for memory in memories), kv], 1)
        keys, values = known.chunk(2, -1)
    return keys, values


def _normed(h: Tensor, norm: nn.Module | None) -> Tensor:
    return h if norm is None else norm(h).to(h.dtype)


class SegmentMixer(Mixer, ABC):
    """A mixer whose memory changes at multiples of `segment_length` steps.

    A subclass defines `read`, `write` and `start`, and calls `by_segments` in `mix`. See
    `linrec.nn.segments.by_segments` for resets, for the meaning of the three, and for `prepare`.

    Args:
        d_model: width of the sequence.
        segment_length: steps of a segment.
        detach: where gradients through the memory stop.
        dropout: probability that an attention weight is dropped, in training alone.
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
