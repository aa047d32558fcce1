"""The rows of a batch: requests that read or generate together, and their states."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from linrec.generation.buffers import StateBuffers
from linrec.generation.caches import with_cache_length
from linrec.mixers import State
from linrec.models import LanguageModel
from linrec.models.ragged import RaggedState, joined, rows_of
from linrec.serve.request import Request
from linrec.trees import leaves

__all__ = ["Rows", "joined_rows", "levelled", "longest_cache"]

# rows that read fewer tokens share a length of their caches
SHORT = 256


class Rows:
    """Requests and the state of their rows; rows join and leave between steps.

    Caches of attention have one length in rows whose numbers of tokens differ by less than a factor of two,
    with room before the steps of rows that read fewer. Other states of different shapes stay apart, in a
    `RaggedState`.

    Args:
        model: the model.

    Attributes:
        requests: the request of each row.
        state: the state of all rows; None without rows.
        buffers: memory for the states of the next steps.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.requests: list[Request] = []
        self.state: State = None
        self.buffers = StateBuffers()

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.requests)

    def join(self, requests: Sequence[Request], state: State) -> None:
        """Append rows, with the state of them all, which nobody must use any more."""
        before, self.requests = self.requests, [*self.requests, *requests]
        if not before:
            self.state = state
        elif _form(state) is not None and _form(state) == _form(self.state):
            self.state = self.buffers.with_rows(self.state, state)
            self.after_step()
        else:
            self.state = joined_rows(self.model, [(before, self.state), (requests, state)])

    def leave(self, gone: Iterable[Request]) -> None:
        """Remove rows; the last ones take their places."""
        gone = set(gone)
        kept = [row for row, request in enumerate(self.requests) if request not in gone]
        if len(kept) == len(self.requests):
            return
        if not kept:
            self.requests, self.state, self.buffers = [], None, StateBuffers()
            return
        last = iter(reversed(kept))
        order = [row if self.requests[row] not in gone else next(last) for row in range(len(kept))]
        ragged = isinstance(self.state, RaggedState)
        self.state = (
            rows_of(self.state, torch.tensor(order)) if ragged else self.buffers.with_order(self.state, order)
        )
        self.requests = [self.requests[row] for row in order]
        self.after_step()

    def after_step(self) -> None:
        """Give caches few lengths, after a step of all rows, or with other rows."""
        self.state = levelled(self.model, self.state, [request.read for request in self.requests])

    def of(self, row: int) -> State:
        """Return the state of one row, in memory of its own."""
        return with_cache_length(self.model, self.some([row]).state, self.requests[row].read)

    def some(self, rows: Sequence[int]) -> "Rows":
        """Return some of the rows."""
        found = Rows(self.model)
        found.join([self.requests[row] for row in rows], rows_of(self.state, torch.tensor(rows)))
        return found


def levelled(model: LanguageModel, state: State, read: Sequence[int]) -> State:
    """Return the state of rows that have read these numbers of tokens, with caches of few lengths."""
    levels = [_level(number) for number in read]
    longest: dict[int, int] = {}
    for number, level in zip(read, levels, strict=True):
        longest[level] = max(longest.get(level, 0), number)
    device = model.embedding.weight.device
    every = torch.arange(len(read), device=device)
    groups = zip(*state, strict=True) if isinstance(state, RaggedState) else [(every, state)]
    found: list[tuple[Tensor, State]] = []
    for rows, group in groups:
        numbers = range(len(read)) if rows is every else rows.tolist()
        places: dict[int, list[int]] = {}
        for place, row in enumerate(numbers):
            places.setdefault(levels[row], []).append(place)
        for level, some in places.items():
            index, part = rows, group
            if len(places) > 1:
                index = rows[torch.tensor(some, device=device)]
                part = rows_of(group, torch.tensor(some, device=device))
            found.append((index, with_cache_length(model, part, longest[level])))
    # the usual case needs no copies
    return found[0][1] if found[0][0] is every else joined(found)


def longest_cache(read: int) -> int:
    """Return the most steps of the caches of a row that has read so many tokens, among other rows."""
    return (1 << _level(read)) - 1


def _level(read: int) -> int:
    return max(SHORT, read).bit_length()


def joined_rows(model: LanguageModel, parts: Sequence[tuple[Sequence[Request], State]]) -> State:
    """Return the state of the rows of all parts, in their order."""
    first, groups = 0, list[tuple[Tensor, State]]()
    for requests, state in parts:
        rows = torch.arange(first, first + len(requests), device=model.embedding.weight.device)
        if isinstance(state, RaggedState):
            groups += [(rows[some], part) for some, part in zip(*state, strict=True)]
        else:
            groups.append((rows, state))
        first += len(requests)
    read = [request.read for requests, _ in parts for request in requests]
    return levelled(model, RaggedState(*zip(*groups, strict=True)), read)


def _form(state: State) -> list[tuple[torch.Size, torch.dtype]] | None:
    """Return the shapes of a row and the dtypes of a state's parts; None if they differ between rows."""
    if isinstance(state, RaggedState):
        return None
    return [(part.shape[1:], part.dtype) for part in leaves(state)]
