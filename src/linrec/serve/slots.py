"""The requests that have a state: they read their prompts in pieces, then generate in rows of batches."""

import functools
import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence

import torch

from linrec.generation.caches import bytes_of_state
from linrec.mixers import State
from linrec.serve.drafts import Draft, DraftedRows
from linrec.serve.graphs import CapturedRows, fixed_state
from linrec.serve.prefixes import PrefixTree
from linrec.serve.request import Ended, Request
from linrec.serve.rows import Rows, Runner, joined_rows, longest_cache

__all__ = ["Slots"]


class Slots:
    """Requests that read their prompts or generate.

    Args:
        runner: the model.
        prefixes: the snapshots, from which requests start and to which they add.
        counts: the numbers of tokens that were read, cached, proposed, accepted and generated.
        chunk: number of tokens of a piece of a prompt.
        prompt_tokens: the most tokens of prompts that a step reads, or a single piece.
        interval: number of tokens between snapshots.
        draft: proposes tokens for speculative decoding.
        slots: the most requests.
        max_length: the most tokens of a request.
        state_bytes: the most bytes of the states of requests at their end; None does not bound them.

    Attributes:
        reading: the requests that read their prompts, and their states.
        kinds: rows of each kind, in the order in which a request looks for a place.
    """

    def __init__(
        self,
        runner: Runner,
        prefixes: PrefixTree,
        counts: Counter[str],
        *,
        chunk: int,
        prompt_tokens: int,
        interval: int,
        draft: Draft | None,
        slots: int,
        max_length: int,
        state_bytes: int | None,
    ) -> None:
        self.runner, self.prefixes, self.counts = runner, prefixes, counts
        self.chunk, self.prompt_tokens, self.interval = chunk, prompt_tokens, interval
        self.slots, self.max_length, self.state_bytes = slots, max_length, state_bytes
        self._bytes_of_level = functools.cache(functools.partial(bytes_of_state, runner.model))
        self.reading: dict[Request, State] = {}
        self.kinds = [Rows(runner) if draft is None else DraftedRows(runner, draft)]
        captures = runner.device.type == "cuda" and not runner.deterministic and draft is None
        if captures and (row := fixed_state(runner)) is not None:
            budget = math.inf if state_bytes is None else state_bytes
            self.kinds.insert(0, CapturedRows(runner, row, budget=budget))

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.reading) + self.n_running

    @property
    def running(self) -> list[Request]:
        """The requests that generate."""
        return [request for rows in self.kinds for request in rows.requests]

    @property
    def n_running(self) -> int:
        """Number of requests that generate."""
        return sum(map(len, self.kinds))

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the states of the requests at their end; 0 if they are not bounded."""
        return sum(map(self._needed, [*self.reading, *self.running]))

    def needed(self, length: int) -> int:
        """Return the bytes of the state of a request of so many tokens; 0 if they are not bounded."""
        if self.state_bytes is None:
            return 0
        return self._bytes_of_level(min(longest_cache(length), self.max_length))

    def room(self, n_prompt: int) -> int:
        """Return the most tokens of an answer to a prompt of so many tokens, at least 1."""
        tokens, most = self.max_length - n_prompt, self.state_bytes
        while tokens > 1 and most is not None and self.needed(n_prompt + tokens) > most:
            # the next shorter length of caches
            tokens = longest_cache(n_prompt + tokens) // 2 - n_prompt
        return max(1, tokens)

    def admit(self, waiting: deque[Request]) -> None:
        """Take the requests that have waited longest, with the states of their longest known prefixes."""
        reserved = self.reserved_bytes if waiting else 0
        while waiting and len(self) < self.slots:
            reserved += self._needed(waiting[0])
            if self.state_bytes is not None and reserved > self.state_bytes:
                break
            request = waiting.popleft()
            # a running row has read all tokens but the newest
            known = [] if request.scores_prompt else request.tokens[:-1]
            request.read, state = self.prefixes.find(known, salt=request.options.salt)
            request.cached = min(request.read, request.n_prompt)
            self.counts["cached"] += request.read
            self.reading[request] = self.runner.model.init_state(1) if state is None else state
        self._run([request for request in self.reading if not request.unread])

    def leave(self, requests: Iterable[Request]) -> None:
        """Remove requests; others are ignored."""
        for rows in self.kinds:
            rows.leave(requests)
        for request in requests:
            self.reading.pop(request, None)

    def read(self) -> None:
        """Read a piece of the prompts that have waited longest for it, pieces of one length together."""
        budget, pieces = self.prompt_tokens, dict[int, list[Request]]()
        for request in self.reading:
            # pieces end at multiples of `chunk`, so that equal prefixes have equal snapshots
            length = min(self.chunk - request.read % self.chunk, request.unread)
            if length > budget and pieces:
                break
            budget -= length
            pieces.setdefault(length, []).append(request)
        for length, requests in pieces.items():
            self._read_piece(requests, length)

    def generate(self) -> dict[Request, Ended | Exception]:
        """Generate tokens of each running request; return the requests that end, with the reason."""
        ends: dict[Request, Ended | Exception] = {}
        # rows whose states have outgrown the fixed memory go on elsewhere
        for rows in self.kinds[:-1]:
            if gone := rows.outgrown():
                self.kinds[-1].join(gone.requests, gone.state)
        for rows in self.kinds:
            if rows:
                ends |= self._generate(rows)
        return ends

    def keep(self, request: Request) -> bool:
        """Keep a snapshot of a running request; return whether it runs."""
        for rows in self.kinds:
            if request in rows.requests:
                self._keep(request, rows.of(rows.requests.index(request)))
                return True
        return False

    def _needed(self, request: Request) -> int:
        return self.needed(request.n_prompt + request.options.n_tokens)

    def _run(self, requests: Sequence[Request]) -> None:
        """Let requests generate that have read their prompt."""
        for rows in self.kinds:
            if some := rows.admitted(requests):
                parts = [([request], self.reading.pop(request)) for request in some]
                rows.join(some, joined_rows(self.runner.model, parts))
                requests = [request for request in requests if request in self.reading]

    def _read_piece(self, requests: Sequence[Request], length: int) -> None:
        rows = Rows(self.runner)
        parts = [([request], self.reading[request]) for request in requests]
        rows.join(requests, joined_rows(self.runner.model, parts))
        tokens = torch.tensor([request.tokens[request.read : request.read + length] for request in requests])
        x = rows.read(tokens)
        self.counts["read"] += tokens.numel()
        for row, request in enumerate(requests):
            if request.scores_prompt:
                after = request.tokens[request.read + 1 : request.read + length + 1]
                request.score(self.runner.logits(x[row]), after)
            request.read += length
            # behind the others, so that long prompts do not hold up short ones
            del self.reading[request]
            self.reading[request] = rows.of(row)
            if self.prefixes.budget and (request.read % self.interval == 0 or not request.unread):
                self._keep(request, self.reading[request])
        self._run([request for request in requests if not request.unread])

    def _generate(self, rows: Rows) -> dict[Request, Ended | Exception]:
        requests, step = list(rows.requests), rows.step()
        ends: dict[Request, Ended | Exception] = {**step.errors}
        self.counts["proposed"] += step.proposed
        for row, request in enumerate(requests):
            if (tokens := step.tokens.get(request)) is None:
                continue
            if request.options.logprobs is not None:
                request.score(step.logits[row], tokens)
            self.counts["accepted"] += len(tokens) - 1
            self.counts["generated"] += len(tokens)
            if (error := request.extend(tokens)) is not None:
                ends[request] = error
        rows.after_step()
        for row, request in enumerate(requests):
            watched = request.options.observer is not None and request not in ends
            if watched and (error := request.observed(rows.of(row))) is not None:
                ends[request] = error
            if request in ends:
                continue
            why = request.complete
            if self.prefixes.budget and (why is not None or request.read % self.interval == 0):
                self._keep(request, rows.of(row))
            if why is not None:
                ends[request] = why
        return ends

    def _keep(self, request: Request, state: State) -> None:
        """Keep a snapshot, unless its bits may depend on how the tokens were read."""
        chunked = request.read % self.chunk == 0 and request.read < request.n_prompt
        if chunked or not self.runner.deterministic:
            self.prefixes.put(request.tokens[: request.read], state, salt=request.options.salt)
