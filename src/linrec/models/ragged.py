"""Batches whose rows read different steps: masks, and states whose shapes differ between rows."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from linrec.mixers import State
from linrec.trees import leaves, map_tree

__all__ = ["RaggedState", "joined", "rows_in", "rows_of", "run_masked"]

# indices of rows, and their state
Group: TypeAlias = tuple[Tensor, State]


class RaggedState(NamedTuple):
    """The state of a model whose rows have read different numbers of steps.

    The states of two rows then may have different shapes: caches of attention have different lengths, and
    segments end at different steps. A group is the rows whose states have one shape.

    Attributes:
        rows: the indices of the rows of each group (k,); every row is in one group.
        states: the state of each group, as a model returns it for these rows alone.
    """

    rows: tuple[Int64[Tensor, "k"], ...]
    states: tuple[State, ...]


def rows_of(state: State, indices: Int64[Tensor, "n"]) -> State:
    """Return the state of the rows of these indices, which may repeat."""
    if not isinstance(state, RaggedState):
        return map_tree(lambda part: part.index_select(0, indices.to(part.device)), state)
    found = []
    for rows, group in zip(*state, strict=True):
        place, row = (indices.to(rows.device)[:, None] == rows).nonzero(as_tuple=True)
        if len(place):
            found.append((place, rows_of(group, row)))
    return joined(found)


def rows_in(state: State) -> int:
    """Return the number of rows of a state."""
    return sum(map(len, state.rows)) if isinstance(state, RaggedState) else len(leaves(state)[0])


def joined(groups: Iterable[Group]) -> State:
    """Return the state of all rows of groups; a `RaggedState` if not all groups have states of one shape."""
    alike: dict[str, list[Group]] = {}
    for rows, state in groups:
        parts = zip(*state, strict=True) if isinstance(state, RaggedState) else [(slice(None), state)]
        for some, part in parts:
            form = map_tree(lambda tensor: (tensor.shape[1:], tensor.dtype), part)
            alike.setdefault(str(form), []).append((rows[some], part))
    found = [_together(*zip(*some, strict=True)) for some in alike.values()]
    if len(found) > 1:
        return RaggedState(*zip(*found, strict=True))
    rows, state = found[0]
    return rows_of(state, rows.argsort())


def _together(rows: tuple[Tensor, ...], states: tuple[State, ...]) -> Group:
    first, *others = states
    if not others:
        return rows[0], first
    further = [iter(leaves(state)) for state in others]
    return torch.cat(rows), map_tree(lambda part: torch.cat([part, *map(next, further)]), first)


def run_masked(
    run: Callable[..., tuple[Tensor, State]],
    x: Float[Tensor, "b t d"],
    state: State,
    mask: Bool[Tensor, "b t"] | None,
    reset: Bool[Tensor, "b t"] | None,
    dt: Float[Tensor, "b t"] | None,
    *,
    padded: bool,
    ended: bool,
) -> tuple[Float[Tensor, "b t d"], State]:
    """Run each row without its masked steps, as if they were not there.

    The output at a masked step is the output of the row's last step before it, or else of its first step, or
    zeros in a row without steps.

    Args:
        run: (x, state, reset, dt) -> (y, state), on some rows and some of their steps.
        x: inputs.
        state: the state before the steps; None at the start of all rows.
        mask: false at steps to leave out; None leaves out no steps.
        reset: true where a document begins. A reset at a masked step counts at the row's next step.
        dt: the time since the step before.
        padded: whether a row may start at a reset behind padding. Rows of different lengths then start in one
            run, else each length has its own.
        ended: whether a row may go on behind its last step, because its state is not needed.
    """
    if mask is not None:
        # weights must not get gradients of NaN times zero
        x = x.masked_fill(~mask[..., None], 0)
    outputs, groups = [], []
    for rows, steps, padding, group in _pieces(x, state, mask, padded=padded, ended=ended):
        begin, at = None, rows if steps is None else (rows[:, None], steps)
        read = x[at]
        if reset is not None:
            document = reset.cumsum(1)[at]
            begin = document.diff(dim=1, prepend=document.new_zeros(len(rows), 1)) > 0
        if padding is not None:
            first = torch.arange(read.shape[1], device=x.device) == padding[:, None]
            begin = first if begin is None else begin | first
        y, group = run(read, group, begin, None if dt is None else dt[at])
        if mask is not None:
            place = mask[rows].cumsum(1) - 1 + (0 if padding is None else padding[:, None])
            place = place.clamp(min=0)[..., None].expand(-1, -1, y.shape[2])
            y = y.gather(1, place) if y.shape[1] else y.new_zeros(place.shape)
        outputs.append(y)
        groups.append((rows, group))
    if len(groups) == 1:
        # all rows, in order
        return outputs[0], groups[0][1]
    order = torch.cat([rows for rows, _ in groups]).argsort()
    return torch.cat(outputs)[order], joined(groups)


def _pieces(
    x: Tensor, state: State, mask: Tensor | None, *, padded: bool, ended: bool
) -> Iterator[tuple[Tensor, Tensor | None, Tensor | None, State]]:
    """Yield rows that run together (k,), their steps (k, n), how many of these are padding (k,), their state.

    Steps of None are all steps.
    """
    (batch, time), compiling = x.shape[:2], torch.compiler.is_compiling()
    every = torch.arange(batch, device=x.device)
    for rows, group in zip(*state, strict=True) if isinstance(state, RaggedState) else [(every, state)]:
        if mask is None:
            yield rows, None, None, group
            continue
        kept = mask[rows]
        counts = kept.sum(1)
        if ended and not compiling and not (kept[:, 1:] > kept[:, :-1]).any():
            yield rows, None, None, group
        elif padded and group is None and (compiling or counts.all()):
            # a compiler needs one shape for all masks
            longest = time if compiling else int(counts.max())
            steps = kept.long().argsort(dim=1, stable=True)[:, time - longest :]
            yield rows, steps, longest - counts, None
        else:
            for count in counts.unique().tolist():
                some = (counts == count).nonzero()[:, 0]
                steps = kept[some].nonzero()[:, 1].view(len(some), count)
                yield rows[some], steps, None, None if group is None else rows_of(group, some)
