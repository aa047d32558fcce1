"""The rows of a batch: requests that read or generate together, and their states."""

from collections.abc import Iterable, Sequence

import torch

from linrec.generation.caches import with_cache_length
from linrec.mixers import State
from linrec.models import LanguageModel
from linrec.models.ragged import RaggedState, joined, rows_of
from linrec.serve.request import Request

__all__ = ["Rows", "joined_rows", "levelled"]


class Rows:
    """Requests and the state of their rows; rows join and leave between steps.

    Caches of attention have one length in all rows, with room before the steps of rows that read fewer.
    Other states of different shapes stay apart, in a `RaggedState`.

    Args:
        model: the model.

    Attributes:
        requests: the request of each row.
        state: the state of all rows; None without rows.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.requests: list[Request] = []
        self.state: State = None

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.requests)

    def join(self, requests: Sequence[Request], state: State) -> None:
        """Append rows, with the state of them all."""
        if self.requests:
            self.state = joined_rows(self.model, [(self.requests, self.state), (requests, state)])
        else:
            self.state = state
        self.requests = [*self.requests, *requests]

    def leave(self, gone: Iterable[Request]) -> None:
        """Remove rows."""
        gone = set(gone)
        kept = [row for row, request in enumerate(self.requests) if request not in gone]
        if len(kept) == len(self.requests):
            return
        rest = self.some(kept) if kept else Rows(self.model)
        self.requests, self.state = rest.requests, rest.state
        if kept:
            longest = max(request.read for request in self.requests)
            self.state = levelled(self.model, self.state, longest)

    def of(self, row: int) -> State:
        """Return the state of one row, in memory of its own."""
        return with_cache_length(self.model, self.some([row]).state, self.requests[row].read)

    def some(self, rows: Sequence[int]) -> "Rows":
        """Return some of the rows."""
        found = Rows(self.model)
        found.join([self.requests[row] for row in rows], rows_of(self.state, torch.tensor(rows)))
        return found


def levelled(model: LanguageModel, state: State, steps: int) -> State:
    """Return the state of rows that have read at most a number of steps, with caches of that length."""
    if not isinstance(state, RaggedState):
        return with_cache_length(model, state, steps)
    groups = (with_cache_length(model, group, steps) for group in state.states)
    return joined(zip(state.rows, groups, strict=True))


def joined_rows(model: LanguageModel, parts: Sequence[tuple[Sequence[Request], State]]) -> State:
    """Return the state of the rows of all parts, in their order."""
    steps = max(request.read for requests, _ in parts for request in requests)
    first, groups = 0, []
    device = model.embedding.weight.device
    for requests, state in parts:
        rows = torch.arange(first, first + len(requests), device=device)
        groups.append((rows, levelled(model, state, steps)))
        first += len(requests)
    return joined(groups)
