"""The rows of a batch: requests that read or generate together, and their states."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from linrec.generation.buffers import StateBuffers
from linrec.generation.caches import with_cache_length
from linrec.generation.precision import autocast
from linrec.literals import Precision
from linrec.mixers import State
from linrec.models import LanguageModel
from linrec.models.ragged import RaggedState, joined, rows_of
from linrec.serve.request import Request
from linrec.serve.sampling import Step, accepted, choose, processed
from linrec.trees import leaves

__all__ = ["Rows", "Runner", "joined_rows", "levelled", "longest_cache"]

# rows that read fewer tokens share a length of their caches
SHORT = 256


@dataclass(frozen=True)
class Runner:
    """How the engine calls its model.

    Attributes:
        model: the model.
        vocab_size: number of token ids to choose from; None is all.
        precision: "32-true", or "bf16-mixed" for autocast in bfloat16.
        deterministic: whether rows are computed one at a time.
    """

    model: LanguageModel
    vocab_size: int | None = None
    precision: Precision = "32-true"
    deterministic: bool = False

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.model.embedding.weight.device

    def hidden(self, tokens: Int64[Tensor, "b n"], state: State) -> tuple[Float[Tensor, "b n d"], State]:
        """Return the head's inputs for further tokens, and the state after them."""
        with autocast(self.precision, self.device):
            return self.model.hidden(tokens.to(self.device), state)

    def logits(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b v"]:
        """Return the logits of the tokens to choose from."""
        with autocast(self.precision, self.device):
            logits: Tensor = self.model.head(x)[..., : self.vocab_size]
        return logits


class Rows:
    """Requests and the state of their rows; rows join and leave between steps.

    Caches of attention have one length in rows whose numbers of tokens differ by less than a factor of two,
    with room before the steps of rows that read fewer. Other states of different shapes stay apart, in a
    `RaggedState`.

    Args:
        runner: the model.

    Attributes:
        requests: the request of each row.
        state: the state of all rows; None without rows.
        buffers: memory for the states of the next steps.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner, self.model = runner, runner.model
        self.requests: list[Request] = []
        self.state: State = None
        self.buffers = StateBuffers()

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.requests)

    def step(self) -> Step:
        """Read the newest token of each row."""
        x = self.read(torch.tensor([[request.tokens[-1]] for request in self.requests]))
        for request in self.requests:
            request.read += 1
        return self._chosen(x, [[]] * len(self))

    def read(self, tokens: Int64[Tensor, "b n"]) -> Float[Tensor, "b n d"]:
        """Return the head's inputs for further tokens of the rows, which the state then has read."""
        x, self.state = self._after(tokens)
        return x

    def admitted(self, requests: Iterable[Request]) -> list[Request]:
        """Return those of the requests for which there is memory."""
        return list(requests)

    def outgrown(self) -> "Rows":
        """Remove the rows whose next step there is no memory for, and return them."""
        return Rows(self.runner)

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
        found = Rows(self.runner)
        found.join([self.requests[row] for row in rows], rows_of(self.state, torch.tensor(rows)))
        return found

    def _after(self, tokens: Tensor) -> tuple[Tensor, State]:
        """Return the head's inputs for further tokens of rows (b, n), and the state after them."""
        if not self.runner.deterministic:
            with self.buffers.following(self.state):
                x, state = self.runner.hidden(tokens, self.state)
            return x, self.buffers.owned(state)
        alone = [self.runner.hidden(tokens[row, None], self.of(row)) for row in range(len(self))]
        device = self.runner.device
        state = joined((torch.tensor([row], device=device), alone[row][1]) for row in range(len(self)))
        return torch.cat([x for x, _ in alone]), state

    def _chosen(self, x: Float[Tensor, "b k d"], guesses: Sequence[Sequence[int]]) -> Step:
        """Return the tokens that follow the newest token and the right guesses of each row."""
        parts = x.split(1 if self.runner.deterministic else len(x))
        logits = torch.cat([self.runner.logits(part) for part in parts])
        valid = torch.isfinite(logits).all(-1).cumprod(1).sum(1).tolist()
        of_rows, errors = processed(logits, self.requests)
        chosen = choose(of_rows, self.requests).tolist()
        return accepted(self.requests, logits, valid, chosen, errors, guesses)


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
