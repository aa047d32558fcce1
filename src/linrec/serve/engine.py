"""The engine: many requests at once in the rows of one batch, which join and leave between steps."""

import dataclasses
import functools
import math
import operator
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from linrec.generation.caches import bytes_of_state
from linrec.generation.precision import autocast, with_weights_cast
from linrec.generation.prompts import checked_vocabulary
from linrec.generation.sampling import Sampling
from linrec.literals import Precision
from linrec.mixers import State
from linrec.models import LanguageModel
from linrec.models.ragged import joined, rows_of
from linrec.rules import at_least, require
from linrec.serve.drafts import Draft
from linrec.serve.graphs import CapturedRows, FixedRows, fixed_state
from linrec.serve.prefixes import PrefixTree
from linrec.serve.request import Ended, Observer, Options, Process, Request
from linrec.serve.rows import Rows, joined_rows, longest_cache
from linrec.serve.sampling import choose

__all__ = ["Engine", "EngineError", "EngineFull"]


class EngineError(RuntimeError):
    """The engine takes no requests, because it is stopped or a step of it has failed."""


class EngineFull(RuntimeError):  # noqa: N818
    """The number of waiting requests has reached its limit; ask again later."""


class Engine:
    """Answers many requests at once, with the tokens that `generate` gives each of them alone.

    A step of the engine reads a piece of some prompts, then generates one token of every running request.
    Requests join and leave between steps. With snapshots, a request starts from the longest prefix that it
    shares with an earlier request.

    On CUDA without `deterministic` and `draft`, steps are replayed as graphs where states have a constant
    shape, or are caches of attention.

    A token differs from the token of `generate` only where rounding decides: batches are of different sizes,
    and in float64 they agree.

    Args:
        model: a causal language model in evaluation mode.
        slots: the most requests that have a state; further requests wait.
        chunk: number of tokens of a piece of a prompt.
        prompt_tokens: the most tokens of prompts that a step reads, or a single piece.
        snapshots: bytes of snapshots, kept after every `interval` tokens, and at the end of prompts and of
            answers; 0 disables them.
        interval: number of tokens between snapshots, a multiple of `chunk`; None is `chunk`. With large
            states, a larger number saves memory.
        max_waiting: the most requests that wait.
        max_length: the most tokens of a prompt and its answer. It bounds caches that grow.
        state_bytes: the most bytes of the states of the requests that have a slot, with the caches that they
            will have at their end; others wait. None does not bound them. A step needs memory for the largest
            caches of a layer again. On CUDA, memory of rows that have left may take as much once more.
        vocab_size: generate only token ids below this number; None allows all.
        precision: "32-true", or "bf16-mixed" for autocast in bfloat16.
        deterministic: run the rows one at a time, so that the bits of an answer do not depend on others. A
            step then takes as long as a step of each row.
        draft: proposes tokens for speculative decoding. The answers stay the same.

    Attributes:
        counts: numbers of tokens "read" from prompts, "cached" and "generated", of tokens "proposed" and
            "accepted" by speculative decoding, and of requests that ended, by the reason.
        failure: the exception that ended the engine.

    Raises:
        ValueError: the model is in training mode, has no outputs for tokens, or sees later steps; a number
            is out of range; or `state_bytes` bounds a model with segments.

    Example:
        >>> from linrec.models import ModelConfig
        >>> model = LanguageModel(ModelConfig(vocab_size=5, d_model=8, n_layers=1)).eval()
        >>> engine = Engine(model, slots=8)
        >>> first, second = engine.submit([1, 2, 3], n_tokens=4), engine.submit([2], n_tokens=2, seed=1)
        >>> len(first.result()), len(second.result())
        (4, 2)
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        slots: int = 256,
        chunk: int = 256,
        prompt_tokens: int = 1024,
        snapshots: int = 2**30,
        interval: int | None = None,
        max_waiting: int = 1024,
        max_length: int = 32_768,
        state_bytes: int | None = None,
        vocab_size: int | None = None,
        precision: Precision = "32-true",
        deterministic: bool = False,
        draft: Draft | None = None,
    ) -> None:
        self.vocab_size = checked_vocabulary(model, vocab_size)
        at_least(1, slots=slots, chunk=chunk, prompt_tokens=prompt_tokens, max_length=max_length)
        at_least(0, max_waiting=max_waiting)
        self.interval = chunk if interval is None else interval
        require(
            self.interval > 0 and self.interval % chunk == 0,
            f"`interval` must be a positive multiple of `chunk` = {chunk}; got {interval}.",
        )
        require(
            all(mixer.is_causal for mixer in model.mixers),
            f"`model` must be causal; the mixer {model.config.mixer!r} sees later steps. Train it with "
            "`causal=True`.",
        )
        require(
            draft is None or draft.vocab_size in (None, model.config.vocab_size),
            f"`draft` must have the tokens of `model`, {model.config.vocab_size}; got "
            f"{draft and draft.vocab_size}.",
        )
        require(
            state_bytes is None or not model.has_segments,
            "`state_bytes` must be None for a model with segments, whose states are bounded; pass fewer "
            "`slots` instead.",
        )
        self.model = with_weights_cast(model, precision)
        self.state_bytes = state_bytes
        self._bytes_of_level = functools.cache(functools.partial(bytes_of_state, self.model))
        self.slots, self.chunk, self.prompt_tokens = slots, chunk, prompt_tokens
        self.max_waiting, self.max_length = max_waiting, max_length
        self.deterministic, self.draft = deterministic, draft
        self.prefixes = PrefixTree(snapshots)
        self.counts: Counter[str] = Counter()
        self.failure: BaseException | None = None
        self._precision = precision
        self._device = next(model.parameters()).device
        self._waiting: deque[Request] = deque()
        self._reading: dict[Request, State] = {}
        # rows whose states have a constant shape, and all others
        self._fixed: FixedRows | None = None
        self._others = Rows(self.model)
        captures = self._device.type == "cuda" and not deterministic and draft is None
        if captures and (row := fixed_state(self.model, precision)) is not None:
            budget = math.inf if state_bytes is None else state_bytes
            options = {"vocab_size": self.vocab_size, "precision": precision}
            self._fixed = CapturedRows(self.model, row, budget=budget, **options)
        # commands of other threads, which run between steps
        self._inbox: deque[Callable[[], None]] = deque()
        self._stepping, self._entering, self._wake = threading.RLock(), threading.RLock(), threading.Event()
        self._n_entering = 0
        self._thread: threading.Thread | None = None
        self._draining = False

    def submit(
        self,
        prompt: Iterable[int],
        *,
        n_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        stop: Iterable[int] = (),
        seconds: float = math.inf,
        process: Process | None = None,
        observer: Observer | None = None,
        logprobs: int | None = None,
        echo: bool = False,
        salt: str = "",
        listener: Callable[[Request], None] | None = None,
    ) -> Request:
        """Ask for the continuation of a prompt; any thread may ask.

        Args:
            prompt: token ids, at least one.
            n_tokens: the most tokens to generate.
            temperature: 0 is greedy; see `linrec.generation.Sampling`, also for `top_k` and `top_p`.
            top_k: maximum number of tokens to choose from; None is all.
            top_p: total probability of the tokens to choose from; None is all.
            seed: seed of the random numbers.
            stop: token ids after which the answer ends.
            seconds: the most time from now on until the answer is cut off.
            process: maps the tokens so far and their logits (v) to other logits, for grammars and penalties.
                An exception ends this request alone.
            observer: called with the request and the state of its row after each step that gave it tokens;
                it must not change the state.
            logprobs: keep the log probabilities of the generated tokens, and of this number of likeliest
                tokens in their places; None is neither.
            echo: keep them for the tokens of the prompt too, which then all are read.
            salt: requests share prefixes only with requests of the same salt.
            listener: called with the request after each step that gave it tokens and when it ends, on the
                thread that runs the engine.

        Raises:
            ValueError: tokens or options are out of range, or the request is longer than `max_length`, or
                needs more than `state_bytes`.
            EngineFull: `max_waiting` requests wait already.
            EngineError: the engine is stopped or has failed.
        """
        tokens = [operator.index(token) for token in prompt]
        stop, known = frozenset(stop), self.model.config.vocab_size
        outside = [token for token in (*tokens, *stop) if not 0 <= token < known]
        require(
            bool(tokens) and not outside,
            f"`prompt` must hold at least one token, and tokens must be in 0 .. {known - 1}; got "
            f"{outside[0] if outside else 'none'}. Encode the text with the model's own tokenizer.",
        )
        options = Options(
            n_tokens=n_tokens,
            sampling=Sampling(temperature, top_k, top_p),
            seed=seed,
            stop=stop,
            seconds=seconds,
            process=process,
            observer=observer,
            logprobs=logprobs,
            echo=echo,
            salt=salt,
        )
        require(
            len(tokens) + n_tokens <= self.max_length,
            f"`prompt` and `n_tokens` must be at most `max_length` = {self.max_length} tokens together; got "
            f"{len(tokens)} + {n_tokens}. Ask for fewer tokens, or pass the engine a larger `max_length`.",
        )
        request = Request(self, tokens, len(tokens), options, listener)
        needed, most = self._needed(request), self.state_bytes
        require(
            most is None or needed <= most,
            f"`prompt` and `n_tokens` must need a state of at most `state_bytes` = {most} bytes; got "
            f"{len(tokens)} + {n_tokens} tokens, which need {needed}. Ask for fewer tokens, or pass a "
            "larger `state_bytes`.",
        )
        return self._entered(request)

    def cancel(self, request: Request) -> None:
        """End a request, whose slot is free at the next step; a request that has ended stays as it is."""
        if request.ended is None:
            self._ask(lambda: self._end([request], "cancelled"))

    def fork(
        self, request: Request, *, seed: int | None = None, listener: Callable[[Request], None] | None = None
    ) -> Request:
        """Return a request that continues from the tokens of another, by default with the same seed.

        The new request has the options of the other one, and its tokens at the next step.
        """
        options = request.options if seed is None else dataclasses.replace(request.options, seed=seed)
        child = Request(self, list(request.tokens), request.n_prompt, options, listener)

        def copied() -> None:
            child.tokens = list(request.tokens)
            for rows in self._running:
                if request in rows.requests:
                    child.logprobs = list(request.logprobs)
                    self._keep(request, rows.of(rows.requests.index(request)))

        return self._entered(child, before=copied)

    def rollback(self, request: Request, n_tokens: int, *, seed: int | None = None) -> None:
        """Take back the last generated tokens of a request, and generate from there.

        The iteration over the request then goes on behind the tokens that are left.

        Args:
            request: the request, which may have ended.
            n_tokens: number of tokens to take back, of the tokens so far.
            seed: a new seed; None is the seed as before, which gives the same tokens again.

        Raises:
            ValueError: the request has generated fewer tokens.
            EngineError: the engine is stopped or has failed.
        """
        with self._entering:
            self._check_accepts()
            length = request.revive(n_tokens)

            def back() -> None:
                self._leave([request])
                request.cut(length, seed)
                self._waiting.append(request)

            self._ask(back)

    def step(self) -> bool:
        """Read a piece of some prompts and generate a token of each running request.

        Returns:
            Whether requests are left.

        Raises:
            EngineError: an earlier step failed.
        """
        with self._stepping, torch.no_grad():
            if self.failure is not None:
                raise EngineError(f"the engine has failed: {self.failure}") from self.failure
            try:
                self._obey()
                self._expire()
                self._admit()
                self._read()
                self._move()
                for rows in self._running:
                    self._generate(rows)
            except BaseException as error:
                with self._entering:
                    self.failure = error
                # the requests that came during the step end too
                self._obey()
                self._end(self._open(), "error", error)
                raise
            return bool(self._waiting or self._reading or self._n_running)

    def start(self) -> None:
        """Run the engine in a thread of its own until `stop`."""
        require(
            self._thread is None and self.accepts, "`start` is called once; make another engine after `stop`."
        )
        self._thread = threading.Thread(target=self._run, name="linrec-engine", daemon=True)
        self._thread.start()

    def drain(self) -> None:
        """Take no further requests."""
        self._draining = True
        self._wake.set()

    def stop(self, *, grace: float = math.inf) -> None:
        """Take no further requests, finish the open ones, and end the thread.

        Args:
            grace: seconds after which open requests are cancelled.
        """
        self.drain()
        if self._thread is None:
            end = time.monotonic() + grace
            while self.failure is None and self.step() and time.monotonic() < end:
                pass
            self._end(self._open(), "cancelled")
            return
        self._thread.join(None if grace == math.inf else grace)
        if self._thread.is_alive():
            self._ask(lambda: self._end(self._open(), "cancelled"))
            self._thread.join()
        self._thread = None

    @property
    def is_running(self) -> bool:
        """Whether a thread runs the engine."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def accepts(self) -> bool:
        """Whether the engine takes requests."""
        return not self._draining and self.failure is None

    @property
    def open_requests(self) -> dict[str, int]:
        """Numbers of requests that are "waiting", "reading" and "running"."""
        return {
            "waiting": len(self._waiting) + self._n_entering,
            "reading": len(self._reading),
            "running": self._n_running,
        }

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the states of the requests that have a slot, at their end; 0 without `state_bytes`."""
        running = (request for rows in self._running for request in rows.requests)
        return sum(map(self._needed, [*self._reading, *running]))

    def room(self, n_prompt: int) -> int:
        """Return the most tokens of an answer to a prompt of so many tokens, at least 1."""
        tokens = self.max_length - n_prompt
        while (
            tokens > 1 and self.state_bytes is not None and self._at_end(n_prompt + tokens) > self.state_bytes
        ):
            # the next shorter length of caches
            tokens = longest_cache(n_prompt + tokens) // 2 - n_prompt
        return max(1, tokens)

    def _needed(self, request: Request) -> int:
        """Return the bytes of the state of a request at its end."""
        return self._at_end(request.n_prompt + request.options.n_tokens)

    def _at_end(self, length: int) -> int:
        if self.state_bytes is None:
            return 0
        return self._bytes_of_level(min(longest_cache(length), self.max_length))

    def _run(self) -> None:
        while True:
            try:
                busy = self.step()
            except Exception:
                # kept as `failure`; the requests have ended
                return
            with self._entering:
                if not busy and not self._inbox and self._draining:
                    return
            if not busy and not self._inbox:
                self._wake.wait()
                self._wake.clear()

    def _ask(self, command: Callable[[], None]) -> None:
        self._inbox.append(command)
        self._wake.set()

    def _obey(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _check_accepts(self) -> None:
        if not self.accepts:
            raise EngineError("the engine is stopped, and takes no requests.")

    def _entered(self, request: Request, *, before: Callable[[], None] = lambda: None) -> Request:
        def enter() -> None:
            self._n_entering -= 1
            if self.failure is None:
                before()
            if request.complete:
                # a fork of a complete answer
                request.end(request.complete)
            else:
                self._waiting.append(request)

        with self._entering:
            self._check_accepts()
            free = self.slots - len(self._reading) - self._n_running
            if len(self._waiting) + self._n_entering >= self.max_waiting + free:
                raise EngineFull(f"{self.max_waiting} requests wait already; ask again later.")
            self._n_entering += 1
            self._ask(enter)
        return request

    @property
    def _running(self) -> list[Rows]:
        """The rows that generate."""
        return [rows for rows in (self._fixed, self._others) if rows is not None and rows.requests]

    @property
    def _n_running(self) -> int:
        return sum(map(len, self._running))

    def _open(self) -> list[Request]:
        running = [request for rows in self._running for request in rows.requests]
        return [*self._waiting, *self._reading, *running]

    def _end(self, requests: Sequence[Request], why: Ended, error: BaseException | None = None) -> None:
        """End the open ones of these requests."""
        requests = [request for request in requests if request.ended is None]
        if not requests:
            return
        self._leave(requests)
        self.counts[why] += len(requests)
        for request in requests:
            if self.draft is not None:
                self.draft.forget(request)
            request.end(why, error)

    def _leave(self, requests: Sequence[Request]) -> None:
        """Take requests from where they wait, read or run."""
        for rows in self._running:
            rows.leave(requests)
        for request in requests:
            self._reading.pop(request, None)
            if request in self._waiting:
                self._waiting.remove(request)

    def _expire(self) -> None:
        """End the requests whose time is over."""
        now = time.monotonic()
        self._end([request for request in self._open() if now > request.deadline], "deadline")

    def _admit(self) -> None:
        """Give free slots to the requests that have waited longest, with the state of their prefix."""
        reserved = self.reserved_bytes if self._waiting else 0
        while self._waiting and len(self._reading) + self._n_running < self.slots:
            reserved += self._needed(self._waiting[0])
            if self.state_bytes is not None and reserved > self.state_bytes:
                break
            request = self._waiting.popleft()
            # a running row has read all tokens but the newest
            known = [] if request.scores_prompt else request.tokens[:-1]
            request.read, state = self.prefixes.find(known, salt=request.options.salt)
            request.cached = min(request.read, request.n_prompt)
            self.counts["cached"] += request.read
            self._reading[request] = self.model.init_state(1) if state is None else state
        self._run_on([request for request in self._reading if not request.unread])

    def _run_on(self, requests: Sequence[Request]) -> None:
        """Let requests generate that have read their prompt."""
        fixed = [] if self._fixed is None else self._fixed.admitted(requests)
        for rows, some in (self._fixed, fixed), (self._others, [r for r in requests if r not in fixed]):
            if rows is not None and some:
                parts = [([request], self._reading.pop(request)) for request in some]
                rows.join(some, joined_rows(self.model, parts))

    def _move(self) -> None:
        """Let rows go on elsewhere whose states have outgrown the fixed memory."""
        if self._fixed is None or not self._fixed.requests:
            return
        if gone := self._fixed.outgrown():
            rows = self._fixed.some([self._fixed.requests.index(request) for request in gone])
            self._fixed.leave(gone)
            self._others.join(gone, rows.state)
        self._fixed.make_room()

    def _read(self) -> None:
        """Read a piece of the prompts that have waited longest for it, pieces of one length together."""
        budget, pieces = self.prompt_tokens, dict[int, list[Request]]()
        for request in self._reading:
            # pieces end at multiples of `chunk`, so that equal prefixes have equal snapshots
            length = min(self.chunk - request.read % self.chunk, request.unread)
            if length > budget and pieces:
                break
            budget -= length
            pieces.setdefault(length, []).append(request)
        for length, requests in pieces.items():
            self._read_piece(requests, length)

    def _read_piece(self, requests: Sequence[Request], length: int) -> None:
        rows = Rows(self.model)
        parts = [([request], self._reading[request]) for request in requests]
        rows.join(requests, joined_rows(self.model, parts))
        tokens = torch.tensor([request.tokens[request.read : request.read + length] for request in requests])
        x, rows.state = self._hidden(tokens, rows)
        self.counts["read"] += tokens.numel()
        for row, request in enumerate(requests):
            if request.scores_prompt:
                after = request.tokens[request.read + 1 : request.read + length + 1]
                request.score(self._head(x[row]), after)
            request.read += length
            # behind the others, so that long prompts do not hold up short ones
            del self._reading[request]
            self._reading[request] = rows.of(row)
            if self.prefixes.budget and (request.read % self.interval == 0 or not request.unread):
                self._keep(request, self._reading[request])
        self._run_on([request for request in requests if not request.unread])

    def _generate(self, rows: Rows) -> None:
        """Generate a token of each row; with a draft, also the tokens that it has guessed."""
        requests, drafted = list(rows.requests), None
        if isinstance(rows, FixedRows):
            logits, chosen = rows.step()
            special = [row for row, request in enumerate(requests) if not request.options.is_plain]
        else:
            given = torch.tensor([[request.tokens[-1]] for request in requests])
            if self.draft is not None:
                drafted = self.draft.propose(requests)
                given = torch.cat([given, drafted], 1)
            x, after = self._hidden(given, rows)
            logits = torch.cat([self._head(part) for part in x.split(1 if self.deterministic else len(x))])
            chosen = torch.isfinite(logits).all(-1).cumprod(1).sum(1, keepdim=True).tolist()
            special = list(range(len(requests)))
        errors = self._choose(logits, requests, special, chosen)
        new: dict[Request, list[int]] = {}
        guesses = [[]] * len(requests) if drafted is None else drafted.tolist()
        for request, (valid, *found), guessed in zip(requests, chosen, guesses, strict=True):
            if valid == 0:
                errors[request] = ValueError("its logits are not finite. Use other weights or precision.")
            elif request not in errors:
                new[request] = request.accepted(found, guessed, valid)
        if not isinstance(rows, FixedRows):
            counts = [len(new[request]) if request in new else given.shape[1] for request in requests]
            rows.state = self._behind(given, rows, after, counts)
        self.counts["proposed"] += sum(map(len, guesses))
        for row, request in enumerate(requests):
            request.score(logits[row], new.get(request, []))
        for request, tokens in new.items():
            self.counts["accepted"] += len(tokens) - 1
            self.counts["generated"] += len(tokens)
            if (error := request.extend(tokens)) is not None:
                errors[request] = error
        rows.after_step()
        complete: dict[Ended, list[Request]] = {"stop": [], "length": []}
        for row, request in enumerate(requests):
            watched = request.options.observer is not None and request not in errors
            if watched and (error := request.observed(rows.of(row))) is not None:
                errors[request] = error
            if request in errors:
                continue
            why = request.complete
            if self.prefixes.budget and (why is not None or request.read % self.interval == 0):
                self._keep(request, rows.of(row))
            if why is not None:
                complete[why].append(request)
        if errors:
            self._leave(list(errors))
        for request, error in errors.items():
            self._end([request], "error", error)
        for why, ended in complete.items():
            self._end(ended, why)

    def _choose(
        self, logits: Tensor, requests: Sequence[Request], some: Sequence[int], chosen: Sequence[list[int]]
    ) -> dict[Request, Exception]:
        """Put tokens of some rows behind the first entry of `chosen`; return the errors of requests."""
        errors: dict[Request, Exception] = {}
        if not some:
            return errors
        of_rows = [requests[row] for row in some]
        processed = any(request.options.process for request in of_rows)
        # the usual case needs no copy
        logits = logits if len(some) == len(requests) and not processed else logits[some]
        for place, request in enumerate(of_rows):
            if request.options.process is None:
                continue
            try:
                found = request.options.process(request.tokens, logits[place, 0])
                require(
                    bool(torch.isfinite(found).any() and (found < math.inf).all()),
                    "`process` must leave a token to choose, and no NaN; got logits without one.",
                )
                logits[place, 0] = found
            except Exception as error:
                errors[request] = error
        for row, tokens in zip(some, choose(logits, of_rows).tolist(), strict=True):
            chosen[row][1:] = tokens
        return errors

    def _hidden(self, tokens: Tensor, rows: Rows) -> tuple[Tensor, State]:
        """Return the head's inputs for further tokens of rows (b, n), and the state after them."""
        tokens = tokens.to(self._device)
        with autocast(self._precision, self._device):
            if not self.deterministic:
                with rows.buffers.following(rows.state):
                    x, state = self.model.hidden(tokens, rows.state)
                return x, rows.buffers.owned(state)
            alone = [self.model.hidden(tokens[row, None], rows.of(row)) for row in range(len(rows))]
        state = joined((torch.tensor([row], device=self._device), alone[row][1]) for row in range(len(rows)))
        return torch.cat([x for x, _ in alone]), state

    def _head(self, x: Tensor) -> Tensor:
        """Return the logits of the tokens to choose from."""
        with autocast(self._precision, self._device):
            logits: Tensor = self.model.head(x)[..., : self.vocab_size]
        return logits

    def _behind(self, given: Tensor, rows: Rows, after: State, counts: Sequence[int]) -> State:
        """Return the state of rows after some of the given tokens: read again, where it is not all of them.

        Args:
            given: tokens (b, n).
            rows: the rows before these tokens.
            after: the state after all of these tokens.
            counts: the number of tokens that each row is to have read.
        """
        every = range(len(rows))
        groups = [(n, [row for row in every if counts[row] == n]) for n in sorted({*counts})]
        if len(groups) == 1 and groups[0][0] == given.shape[1]:
            return after
        found = []
        for n, some in groups:
            index = torch.tensor(some, device=self._device)
            state = rows_of(after, index)
            if n < given.shape[1]:
                _, state = self._hidden(given[some, :n], rows.some(some))
            found.append((index, state))
        return joined(found)

    def _keep(self, request: Request, state: State) -> None:
        """Keep a snapshot, unless its bits may depend on how the tokens were read."""
        if not self.deterministic or (request.read % self.chunk == 0 and request.read < request.n_prompt):
            self.prefixes.put(request.tokens[: request.read], state, salt=request.options.salt)
