"""Memory that the steps of a generation on the CPU write their states into, again and again."""

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor

from linrec.mixers import State
from linrec.ops.core.kernel import Memory, allocated, successors
from linrec.torch_private import references
from linrec.trees import leaves, map_tree

__all__ = ["StateBuffers"]

# the C library reuses smaller memory by itself
LEAST = 1 << 17


class StateBuffers:
    """Two buffers for each large part of a state, which steps fill in turn.

    The operating system maps new memory page by page, which takes longer than a step of many rows. So a step
    writes its state into a buffer of an earlier one, unless anyone still refers to that: a state that a user,
    a snapshot or a hook holds stays as it is. Kernels without a successor, and GPUs, allocate.

    Buffers have room for more rows, so that a row that joins or leaves is the copy of a single row.
    """

    def __init__(self) -> None:
        # the buffers of each part, and the references to a buffer that is free
        self._buffers: dict[int, list[tuple[Tensor, int]]] = {}

    def following(self, state: State) -> contextlib.AbstractContextManager[None]:
        """Return the context of a step, which may write the state that follows this one into the buffers."""
        large = [(n, part) for n, part in enumerate(leaves(state)) if _is_large(part)]
        if not large:
            return contextlib.nullcontext()
        return successors((part, self._free(n, part, len(part))[: len(part)]) for n, part in large)

    def owned(self, state: State) -> State:
        """Return the state in tensors of its own, so that a reference to the model's tensors is noticed."""
        return map_tree(lambda part: part.view_as(part) if _is_large(part) else part, state)

    def with_rows(self, state: State, others: State) -> State:
        """Return an owned state with the rows of another one of the same form behind its own.

        The state must not be used any more.
        """
        further = iter(enumerate(leaves(others)))

        def longer(part: Tensor) -> Tensor:
            n, more = next(further)
            rows = len(part) + len(more)
            if not _is_large(part):
                return torch.cat([part, more])
            buffer = self._own(n, part)
            if buffer is None or len(buffer) < rows:
                buffer = self._free(n, part, rows)
                buffer[: len(part)] = part
            buffer[len(part) : rows] = more
            return buffer[:rows]

        return map_tree(longer, state)

    def with_order(self, state: State, order: Sequence[int]) -> State:
        """Return the rows of these numbers of an owned state, which must not be used any more."""
        moved = [(row, place) for place, row in enumerate(order) if row != place]
        parts = iter(range(len(leaves(state))))
        rows, places = torch.tensor(moved, dtype=torch.int64).view(-1, 2).unbind(1)

        def chosen(part: Tensor) -> Tensor:
            buffer = self._own(next(parts), part)
            if buffer is None:
                return part.index_select(0, torch.tensor(order, device=part.device))
            if moved:
                buffer[places] = buffer[rows]
            return buffer[: len(order)]

        return map_tree(chosen, state)

    def _own(self, n: int, part: Tensor) -> Tensor | None:
        """Return the buffer that a part begins, if nobody else refers to it."""
        if not part.is_contiguous():
            return None
        for buffer, count in self._buffers.get(n, []):
            alike = (buffer.data_ptr(), buffer.shape[1:]) == (part.data_ptr(), part.shape[1:])
            if alike and references(buffer) == count + 1:
                return buffer
        return None

    def _free(self, n: int, part: Tensor, rows: int) -> Tensor:
        """Return a buffer that has room for so many rows like those of a part."""
        kept = [
            (buffer, count)
            for buffer, count in self._buffers.get(n, [])
            if (buffer.shape[1:], buffer.dtype) == (part.shape[1:], part.dtype)
            and rows <= len(buffer) <= 4 * rows
        ]
        for buffer, count in kept:
            if references(buffer) == count:
                return buffer
        # the room takes no memory before it is written
        room = 1 << rows.bit_length()
        buffer = allocated(Memory((room, *part.shape[1:]), part.dtype), part.device)
        # one that a user holds is replaced
        self._buffers[n] = [*kept[-1:], (buffer, references(buffer))]
        return buffer


def _is_large(part: Tensor) -> bool:
    return part.is_cpu and part.nbytes >= LEAST
