"""Rows in fixed memory, and their steps as CUDA graphs: one launch in place of hundreds."""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from linrec.generation.caches import has_rings, with_cache_length, with_places, with_rings, without_rings
from linrec.mixers import State
from linrec.models.compilation import EAGER_STEPS
from linrec.models.ragged import RaggedState, rows_of
from linrec.ops.core.garbage import uncollected
from linrec.ops.core.kernel import successors
from linrec.serve.request import Request
from linrec.serve.rows import SHORT, Rows, Runner
from linrec.serve.sampling import Step, accepted, choose, choose_plain, processed
from linrec.trees import leaves, map_tree

__all__ = ["CapturedRows", "FixedRows", "fixed_state"]

# slots of rings at most, as times of the steps in them: a long row would make each step of short rows longer
WASTE = 8
# share of the budget above which memory shrinks
MUCH = 0.125


class FixedRows(Rows):
    """Rows whose states lie in memory of a constant shape, which steps overwrite.

    Where no request asks for more than tokens, the next step begins before the tokens of a step are looked
    at, so that the host and a GPU work at the same time. Requests have then read their newest token too.
    A row that leaves gives its place to the last one. Caches of attention are rings of one length, in which
    all rows write the same slot. Memory grows to the next power of two of rows and of steps. Much memory
    shrinks where a quarter is enough.

    Args:
        runner: the model.
        row: the state of one row, from `fixed_state`.
        budget: the most bytes of all states; rows that do not fit are not admitted.

    Attributes:
        taken: number of steps of all rows since the memory was made.
    """

    def __init__(self, runner: Runner, row: State, *, budget: float = math.inf) -> None:
        super().__init__(runner)
        self.budget, self.taken = budget, 0
        self._bytes = functools.cache(self._bytes_of)
        self._row = map_tree(lambda part: part.to("meta"), row)
        self._grows = any(mixer.state_grows for mixer in self.model.mixers)
        self._memory: State = None
        # numbers of rows and of steps that there is memory for
        self._size = 0, 0
        # the next slot of rings, by their numbers of slots
        self._places: dict[int, Tensor] = {}
        # a step that is on its way: the places of its requests, and what `_stepped` returns
        self._ahead: tuple[dict[Request, int], Tensor, Tensor] | None = None

    def step(self) -> Step:
        """Read the newest token of each row; return the tokens that follow those read so far."""
        if self._ahead is None:
            self._launch({})
        assert self._ahead is not None
        (places, logits, found), self._ahead = self._ahead, None
        # waits for the device
        numbers, requests = found.tolist(), list(places)
        valid = [numbers[place][0] for place in places.values()]
        tokens = [numbers[place][1:] for place in places.values()]
        ahead = all(request.options.runs_ahead for request in self.requests)
        if ahead and self._has_room() and self._fits(self.requests):
            # the device reads the new tokens while the host looks at them
            self._launch({request: token for request, (token,) in zip(requests, tokens, strict=True)})
        errors: dict[Request, Exception] = {}
        if some := [row for row, request in enumerate(requests) if not request.options.is_plain]:
            special = [requests[row] for row in some]
            of_rows, errors = processed(logits[some], special)
            for row, chosen in zip(some, choose(of_rows, special).tolist(), strict=True):
                tokens[row] = chosen
        return accepted(requests, logits, valid, tokens, errors, [[]] * len(requests))

    def _launch(self, newest: Mapping[Request, int]) -> None:
        """Begin to read a token of each row: of `newest`, where the request does not have it yet."""
        self._make_room()
        n = len(self)
        step = 1 << max(0, n.bit_length() - 3)
        size = min(-(-n // step) * step, self._size[0])
        given = [
            (newest.get(r, r.tokens[-1]), r.options.sampling.temperature, r.uniform(ahead=r in newest))
            for r in self.requests
        ]
        rows = torch.tensor(given + [(0, 0.0, 0.0)] * (size - n), dtype=torch.float64)
        logits, found = self._run(size, rows)
        self.taken += 1
        for request in self.requests:
            request.read += 1
        places = {request: place for place, request in enumerate(self.requests)}
        self._ahead = places, logits[:n], found[:n]

    def _run(self, size: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        state = self._part(size)
        logits, chosen, after = self._stepped(rows.to(self.runner.device), state)
        _write(state, after)
        return logits, chosen

    @torch.no_grad()
    def _stepped(self, rows: Float[Tensor, "n 3"], state: State) -> tuple[Tensor, Tensor, State]:
        tokens, temperature, uniform = rows.unbind(1)
        x, after = self.runner.hidden(tokens.long()[:, None], state)
        logits = self.runner.logits(x)
        chosen = choose_plain(logits[:, 0], temperature[:, None], uniform[:, None])
        return logits, torch.stack([torch.isfinite(logits[:, 0]).all(-1).long(), chosen], 1), after

    def _part(self, rows: int) -> State:
        """Return the state of the first rows, also of those in use by no request."""
        return with_places(self.model, map_tree(lambda part: part[:rows], self._memory), self._place)

    def admitted(self, requests: Iterable[Request]) -> list[Request]:
        """Return those of the requests for which there is memory."""
        found: list[Request] = []
        for request in requests:
            if self._fits([*self.requests, *found, request]):
                found.append(request)
        return found

    def join(self, requests: Sequence[Request], state: State) -> None:
        """Append rows, with the state of them all."""
        first, size = len(self), self._needed([*self.requests, *requests])
        if size[0] > self._size[0] or size[1] > self._size[1]:
            self._resize(size)
        self.requests = [*self.requests, *requests]
        groups = zip(*state, strict=True) if isinstance(state, RaggedState) else [(None, state)]
        for rows, group in groups:
            rings = with_rings(self.model, group, self._size[1], self.taken)
            for place, part in zip(leaves(self._memory), leaves(rings), strict=True):
                place[slice(first, len(self)) if rows is None else first + rows] = part.to(place.dtype)

    def leave(self, gone: Iterable[Request]) -> None:
        """Remove rows."""
        left = set(gone) & set(self.requests)
        if self._ahead is not None:
            for request in left:
                self._ahead[0].pop(request, None)
        n = len(self) - len(left)
        holes = [row for row in range(n) if self.requests[row] in left]
        last = [row for row in range(n, len(self)) if self.requests[row] not in left]
        if holes:
            for place in leaves(self._memory):
                place[holes] = place[last]
        for hole, row in zip(holes, last, strict=True):
            self.requests[hole] = self.requests[row]
        self.requests = self.requests[:n]
        rows, steps = self._needed(self.requests)
        # little memory stays: a smaller one needs new graphs
        is_much = self._bytes(self._size) > MUCH * self.budget
        if left and is_much and 4 * rows * steps <= self._size[0] * self._size[1]:
            self._resize((rows, steps))

    def some(self, rows: Sequence[int]) -> Rows:
        """Return some of the rows, in memory of their own."""
        found = Rows(self.runner)
        found.requests = [self.requests[row] for row in rows]
        state = rows_of(self._memory, torch.tensor(rows))
        steps = max((request.read for request in found.requests), default=0)
        found.state = without_rings(self.model, state, steps, self.taken)
        return found

    def after_step(self) -> None:
        """Leave the state as it is."""

    def outgrown(self) -> Rows:
        """Remove the longest rows, until there is memory for the next step of the others."""
        kept, gone = list(self.requests), list[Request]()
        # rows whose step is on its way wait for its tokens
        while self._ahead is None and kept and not self._fits(kept):
            gone.append(max(kept, key=lambda request: request.read))
            kept.remove(gone[-1])
        if not gone:
            return super().outgrown()
        found = self.some([self.requests.index(request) for request in gone])
        self.leave(gone)
        return found

    def _has_room(self) -> bool:
        """Return whether there is memory for the next step of all rows."""
        rows, steps = self._needed(self.requests)
        return rows <= self._size[0] and steps <= self._size[1]

    def _make_room(self) -> None:
        """Have memory for the next step of all rows."""
        if not self._has_room():
            self._resize(self._needed(self.requests))

    def _place(self, slots: int) -> Tensor:
        if slots not in self._places:
            self._places[slots] = torch.tensor([self.taken % slots], device=self.runner.device)
        return self._places[slots]

    def _needed(self, requests: Sequence[Request]) -> tuple[int, int]:
        longest = max((request.read for request in requests), default=0) if self._grows else 0
        return 1 << max(0, len(requests) - 1).bit_length(), max(SHORT, 1 << longest.bit_length())

    def _fits(self, requests: Sequence[Request]) -> bool:
        rows, steps = size = self._needed(requests)
        used = sum(max(SHORT, request.read) for request in requests)
        return self._bytes(size) <= self.budget and rows * steps <= WASTE * used

    def _bytes_of(self, size: tuple[int, int]) -> int:
        row = with_rings(self.model, self._row, size[1], 0)
        return size[0] * sum(part.nbytes for part in leaves(row))

    def _resize(self, size: tuple[int, int]) -> None:
        """Have memory for these numbers of rows and steps."""
        kept = self.some(range(len(self))).state if self.requests else None
        device, (rows, steps) = self.runner.device, size
        form = with_rings(self.model, self._row, steps, 0)
        self._memory, self._places = None, {}
        self._memory = map_tree(lambda x: x.new_zeros(rows, *x.shape[1:], device=device), form)
        self._size = size
        if kept is not None:
            rings = with_rings(self.model, kept, steps, self.taken)
            for place, part in zip(leaves(self._memory), leaves(rings), strict=True):
                place[: len(self)] = part


class CapturedRows(FixedRows):
    """Fixed rows whose steps are replayed as CUDA graphs, each of them a single launch.

    There is a graph for each number of rows with three leading binary digits. Fewer rows take the next larger
    graph, which computes further rows for nothing.

    Args:
        runner: the model.
        row: the state of one row, from `fixed_state`.
        budget: the most bytes of all states, at most half of the memory that is free.
    """

    def __init__(self, runner: Runner, row: State, *, budget: float = math.inf) -> None:
        # the other half is for prompts, for states that are copied, and for what does not fit here
        free = torch.cuda.mem_get_info(runner.device)[0]
        super().__init__(runner, row, budget=min(budget, free / 2))
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]] = {}
        self._pool: Any = None

    def _run(self, size: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        if size not in self._graphs:
            with torch.cuda.device(self.runner.device):
                self._graphs[size] = self._recorded(size)
        graph, (given, logits, chosen) = self._graphs[size]
        given.copy_(rows)
        graph.replay()
        return logits, chosen

    def _resize(self, size: tuple[int, int]) -> None:
        # a pool ends with the last of its graphs
        self._graphs, self._pool = {}, torch.cuda.graph_pool_handle()
        super()._resize(size)

    def _recorded(self, size: int) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
        state, rows = self._part(size), torch.zeros(size, 3, dtype=torch.float64, device=self.runner.device)
        # compiles and tunes kernels; rings are written in place, in the slots that the step itself writes
        self._stepped(rows, state)
        graph = torch.cuda.CUDAGraph()
        with uncollected(), torch.cuda.graph(graph, pool=self._pool):
            # kernels read a state before they write the next one to its place
            with successors((part, part) for part in leaves(state)):
                logits, chosen, after = self._stepped(rows, state)
            _write(state, after)
        return graph, (rows, logits, chosen)


@torch.no_grad()
def fixed_state(runner: Runner) -> State:
    """Return the state of one row without caches' steps, or None if its shape is not constant otherwise."""
    model, forms = runner.model, []
    if not has_rings(model):
        return None
    state = model.init_state(1)
    for _ in range(EAGER_STEPS):
        _, state = runner.hidden(torch.zeros(1, 1, dtype=torch.int64), state)
        if isinstance(state, RaggedState):
            return None
        alike = with_cache_length(model, state, EAGER_STEPS)
        forms.append([(part.shape, part.dtype) for part in leaves(alike)])
    return with_cache_length(model, state, EAGER_STEPS) if all(form == forms[0] for form in forms) else None


def _write(places: State, state: State) -> None:
    """Copy a state to places, which some parts of it may share."""
    pairs = list(zip(leaves(places), leaves(state), strict=True))
    shared = {place.untyped_storage().data_ptr() for place, _ in pairs}
    new = [(place, part) for place, part in pairs if place.data_ptr() != part.data_ptr()]
    # what lies in another part's place is read before that part is written
    new = [(x, y.clone() if y.untyped_storage().data_ptr() in shared else y) for x, y in new]
    for place, part in new:
        place.copy_(part)
