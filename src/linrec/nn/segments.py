"""Sequences cut into segments, with a memory between them: the driver of recurrent transformers."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import functional

from linrec.ops.core.ambient import checkpointed
from linrec.ops.core.call import in_turn
from linrec.ops.core.isolation import Isolation, beside, documents, entering
from linrec.rules import require
from linrec.trees import Tree, leaves, map_tree

__all__ = [
    "Detach",
    "SegmentState",
    "Sight",
    "by_segments",
    "check_detach",
    "chosen",
    "first_state",
    "run_segments",
]

Detach: TypeAlias = Literal["never", "segment"] | int


class SegmentState(NamedTuple):
    """The state of a sequence that is cut into segments.

    The unfinished segment has r steps. Boundaries between segments are at multiples of the segment length,
    the same for all rows, so r is the position of the next step in its segment.

    Attributes:
        memory: the memory that the finished segments left, tensors (b, n, ...).
        segment: the steps of the unfinished segment as the mixer keeps them, tensors (b, r, d, ...). Steps
            from before a row's last reset are zeros. Of a memory across a stack: the states of the blocks.
        alive: which of these steps are of the row's current sequence, (b, r).
        position: steps since the start of the stream (b,), int64. A reset does not change the position.
    """

    memory: Tree
    segment: Tree
    alive: Bool[Tensor, "b r"]
    position: Int[Tensor, "b"]


class Sight(NamedTuple):
    """The earlier steps that t new steps of a segment with r cached steps see.

    Attributes:
        memory: whether a new step sees the memory (b, t); None if all new steps see it. A step that does not
            see the memory comes after a reset in this segment, and sees an empty memory.
        steps: whether a new step sees a step of the segment (b or 1, t, r + t); None if r is 0 and each new
            step sees the new steps up to itself.
    """

    memory: Bool[Tensor, "b t"] | None
    steps: Bool[Tensor, "#b t s"] | None

    def of_memory(self, alive: Bool[Tensor, "b m"], time: int) -> Bool[Tensor, "b t m"]:
        """Return whether a new step sees each of m steps of the memory.

        Args:
            alive: which of the steps in the memory are of the row's sequence.
            time: new steps t.
        """
        seen = alive[:, None].expand(-1, time, -1)
        return seen if self.memory is None else seen & self.memory[..., None]

    def of(
        self, alive: Bool[Tensor, "b m"], time: int, *, window: int | None = None
    ) -> Bool[Tensor, "b t n"]:
        """Return whether a new step sees each of m steps of the memory, then each step of the segment.

        Args:
            alive: which of the steps in the memory are of the row's sequence.
            time: new steps t.
            window: the most steps that a step sees, with its own; None has no limit.
        """
        steps = _causal(0, time, alive.device)[None] if self.steps is None else self.steps
        seen = torch.cat([self.of_memory(alive, time), steps.expand(alive.shape[0], -1, -1)], -1)
        return seen if window is None else seen.triu(seen.shape[-1] - time - window + 1)


Read: TypeAlias = Callable[[Tensor, Tree, Tree, Sight], tuple[Tensor, Tree]]
Write: TypeAlias = Callable[..., Tree]
Piece: TypeAlias = Callable[[Tensor, SegmentState, Tensor | None], tuple[Tensor, SegmentState]]
Finish: TypeAlias = Callable[[SegmentState], tuple[Tree, Tree]]
Prepare: TypeAlias = Callable[[Tree], Tree]


def check_detach(detach: Detach) -> None:
    """Raise ValueError unless `detach` is "never", "segment" or a number of segments, at least 1."""
    is_number = isinstance(detach, int) and not isinstance(detach, bool) and detach >= 1
    require(
        is_number or detach in ("never", "segment"),
        f'`detach` must be "never", "segment", or a number of segments of at least 1; got {detach!r}. '
        "A number n lets gradients pass from a segment to at most n - 1 segments before it.",
    )


def first_state(memory: Tree, segment: Tree, *, length: int, position: int = 0) -> SegmentState:
    """Return the state at `position` of a stream whose earlier steps are not part of any sequence.

    Args:
        memory: the initial memory, tensors (b, n, ...).
        segment: cached steps of an empty segment, tensors (b, 0, d, ...).
        length: steps of a segment.
        position: steps since the start of the stream, at least 0.
    """
    require(position >= 0, f"`position` must be at least 0; got {position}. Count from the stream's start.")
    batch, device, steps = leaves(segment)[0].shape[0], leaves(segment)[0].device, position % length
    segment = map_tree(lambda x: x.new_zeros(batch, steps, *x.shape[2:]), segment)
    alive = torch.zeros(batch, steps, dtype=torch.bool, device=device)
    return SegmentState(memory, segment, alive, torch.full((batch,), position, device=device))


def by_segments(
    name: str,
    read: Read,
    write: Write,
    x: Tensor,
    state: SegmentState,
    *,
    length: int,
    fresh: Tree,
    prepare: Prepare = lambda memory: memory,
    given: Tensor | None = None,
    reset: Bool[Tensor, "b t"] | None = None,
    detach: Detach = "segment",
) -> tuple[Tensor, SegmentState]:
    """Run a memory from segment to segment, and cache the steps of an unfinished segment.

        y_s, c_s = read(x_s, M_s, c_s)      steps of segment s, in one piece or in several
        M_{s+1} = write(M_s, c_s)           at the end of segment s

    A reset at step t empties the row's memory: steps from t on see `fresh` in place of the memory, and no
    step of the segment before t. The boundaries of segments do not move. The result equals a run of the row
    from the state at t's position.

    NaN and infinity before a reset do not reach later steps: `read` gets zeros in their place.

    Args:
        name: the mixer's name, for errors.
        read: returns the outputs of new steps (b, t, d), and the cached steps of the segment with the new
            steps appended, from the new steps (b, t, d), the memory, the cached steps (b, r, ...) and a
            `Sight`. A step must not depend on later steps.
        write: returns the next memory from the memory, the cached steps (b, length, ...) and which of them
            are of the row's current sequence (b, length). The other cached steps are zeros. With `given`,
            an element of it (b, ...) is a further argument.
        x: inputs (b, t, d), any t, zero included.
        state: the state that an earlier call returned, or `first_state`.
        length: steps of a segment.
        fresh: the memory of a sequence's start, as `state.memory`.
        prepare: adds to a memory what both `read` and `write` take from it, once for each piece of a segment
            without resets. Until the segment ends, the state holds the memory with the addition.
        given: an element for each boundary that `x` reaches, in order, (b, n, ...).
        reset: (b, t) bool; true where a new sequence starts.
        detach: where gradients stop: "never"; "segment", at every boundary; or a number n, at every n-th
            boundary of the stream. With a number, the graph of the segments before stays in memory; detach
            the state between backward passes.

    Returns:
        The outputs, and the state after the last step.
    """
    piece = partial(_piece, read, prepare, fresh=fresh)
    finish = partial(_written, write, iter(() if given is None else given.unbind(1)))
    return run_segments(name, piece, finish, x, state, length=length, reset=reset, detach=detach)


def run_segments(
    name: str,
    piece: Piece,
    finish: Finish,
    x: Tensor,
    state: SegmentState,
    *,
    length: int,
    reset: Bool[Tensor, "b t"] | None = None,
    detach: Detach = "segment",
    recompute: bool = False,
) -> tuple[Tensor, SegmentState]:
    """Run pieces of segments one after another, and finish each segment at its boundary.

    `by_segments` calls this function. Here the cached segment may be any tree.

    Args:
        name: the name of the mixer or of the memory, for errors.
        piece: returns the outputs of new steps of one segment, and the state after them, from the new steps
            (b, t, d), the state and the resets of these steps (b, t) or None.
        finish: returns the next memory and an empty segment, from the state at the end of a segment.
        x: inputs (b, t, d), any t, zero included.
        state: the state that an earlier call returned, or the first state.
        length: steps of a segment.
        reset: (b, t) bool; true where a new sequence starts.
        detach: where gradients stop, as in `by_segments`.
        recompute: whether to run each piece and its `finish` again in the backward pass, so that the graph
            stores the states between segments alone.

    Returns:
        The outputs, and the state after the last step.
    """

    def run(state: SegmentState) -> tuple[Tensor, SegmentState]:
        return _run_segments(name, piece, finish, x, state, length, reset, detach, recompute)

    return in_turn(name, run, state, [x])


def _run_segments(
    name: str,
    piece: Piece,
    finish: Finish,
    x: Tensor,
    state: SegmentState,
    length: int,
    reset: Tensor | None,
    detach: Detach,
    recompute: bool,
) -> tuple[Tensor, SegmentState]:
    done, time = state.alive.shape[1], x.shape[1]
    require(
        done < length,
        f"`state` must hold less than one segment of {length} steps; got {done} steps. Pass a state of a "
        f"`{name}` of this segment length, or None.",
    )

    def advance(x: Tensor, state: SegmentState, reset: Tensor | None) -> tuple[Tensor, SegmentState]:
        y, state = piece(x, state, reset)
        if state.alive.shape[1] == length:
            state = _finished(finish, state, length, detach)
        return y, state

    again = recompute and torch.is_grad_enabled()
    run = checkpointed(advance) if again else advance
    outputs, last, begins = [], state, [0, *range(length - done, time, length)]
    # without any steps there is a piece of none, whose output has the right width
    for begin, end in zip(begins, [*begins[1:], time], strict=True):
        now = None if reset is None else reset[:, begin:end]
        y, last = run(x[:, begin:end], last, now)
        outputs.append(y)
    return torch.cat(outputs, 1), last if time else state


def _piece(
    read: Read, prepare: Prepare, x: Tensor, state: SegmentState, reset: Tensor | None, fresh: Tree
) -> tuple[Tensor, SegmentState]:
    """Read steps of one segment; `reset` is of these steps."""
    memory, segment, alive, position = state
    steps, time = alive.shape[1], x.shape[1]
    position = position + time
    if reset is None:
        alive = functional.pad(alive, (0, time), value=True)
        seen = _causal(steps, time, x.device) & alive[:, None] if steps else None
        memory = prepare(memory)
        y, segment = read(x, memory, segment, Sight(None, seen))
        return y, SegmentState(memory, segment, alive, position)
    # dead steps have a number of their own
    document = torch.cat([alive.long() - 1, documents(reset)], 1)
    own = document[:, steps:]
    same = document[:, None] == own[..., None]
    sight = Sight(own == 0, _causal(steps, time, x.device) & same)
    # the memory is a step before the segment
    isolation = Isolation(functional.pad(document, (1, 0)))
    entered = _floats(lambda part: isolation.enter(entering(part, reset)[:, None], begin=0)[:, 0], memory)
    cached = _floats(lambda part: isolation.enter(part, begin=1), segment)
    y, segment = read(isolation.enter(x, begin=1 + steps), prepare(entered), cached, sight)
    y = isolation.leave(y, begin=1 + steps)
    # without new steps the last one may be dead
    alive = (document == document[:, -1:]) & (document >= 0)
    segment = _floats(lambda part: isolation.leave(part, begin=1), segment)
    segment = map_tree(lambda part: part.masked_fill(~beside(alive, part), 0), segment)
    # a discarded memory must not reach the gradients of what prepares it
    discarded = reset.any(1)
    memory = _floats(lambda part: part.masked_fill(beside(discarded, part), 0), memory)
    memory = chosen(discarded, prepare(fresh), prepare(memory))
    return y, SegmentState(memory, segment, alive, position)


def _written(write: Write, given: Iterator[Tensor], state: SegmentState) -> tuple[Tree, Tree]:
    """Return the next memory and an empty segment."""
    # a view would keep the memory of the steps
    empty = map_tree(lambda part: part.new_zeros(part.shape[0], 0, *part.shape[2:]), state.segment)
    more = next(given, None)
    return write(state.memory, state.segment, state.alive, *(() if more is None else (more,))), empty


def _finished(finish: Finish, state: SegmentState, length: int, detach: Detach) -> SegmentState:
    """Write a complete segment to the memory."""
    memory, segment = finish(state)
    if detach == "segment":
        memory = map_tree(Tensor.detach, memory)
    elif isinstance(detach, int):
        # by rows, because a look at the values would wait for the device
        cut = state.position // length % detach == 0
        memory = chosen(cut, map_tree(Tensor.detach, memory), memory)
    return SegmentState(memory, segment, state.alive.new_zeros(state.alive.shape[0], 0), state.position)


def _causal(steps: int, time: int, device: torch.device) -> Tensor:
    """Return the causal mask (t, r + t) of t new steps after r steps."""
    return torch.ones(time, steps + time, dtype=torch.bool, device=device).tril(steps)


def _floats(change: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    """Apply a function to floating tensors."""
    return map_tree(lambda part: change(part) if part.is_floating_point() else part, tree)


def chosen(rows: Bool[Tensor, "b"], tree: Tree, other: Tree) -> Any:
    """Return one tree of tensors (b, ...) where `rows` (b,) is true, and the other tree elsewhere."""
    others = iter(leaves(other))

    def choose(part: Tensor) -> Tensor:
        old = next(others)
        return torch.where(beside(rows, old), part.to(old.dtype), old)

    return map_tree(choose, tree)
