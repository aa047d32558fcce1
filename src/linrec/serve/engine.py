"""The engine: many requests at once in the rows of one batch, which join and leave between steps."""

import dataclasses
import math
import operator
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping

import torch

from linrec.generation.precision import with_weights_cast
from linrec.generation.prompts import checked_vocabulary
from linrec.generation.sampling import Sampling
from linrec.literals import Precision
from linrec.models import LanguageModel
from linrec.rules import at_least, require
from linrec.serve.drafts import Draft
from linrec.serve.prefixes import PrefixTree
from linrec.serve.request import Ended, Observer, Options, Process, Request
from linrec.serve.rows import Runner
from linrec.serve.slots import Slots

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
        interval = chunk if interval is None else interval
        require(
            interval > 0 and interval % chunk == 0,
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
        self.max_waiting, self.max_length, self.draft = max_waiting, max_length, draft
        self.prefixes = PrefixTree(snapshots)
        self.counts: Counter[str] = Counter()
        self.failure: BaseException | None = None
        self._waiting: deque[Request] = deque()
        self._slots = Slots(
            Runner(self.model, self.vocab_size, precision, deterministic),
            self.prefixes,
            self.counts,
            chunk=chunk,
            prompt_tokens=prompt_tokens,
            interval=interval,
            draft=draft,
            slots=slots,
            max_length=max_length,
            state_bytes=state_bytes,
        )
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
        needed, most = self._slots.needed(len(tokens) + n_tokens), self._slots.state_bytes
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
            self._ask(lambda: self._end({request: "cancelled"}))

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
            if self._slots.keep(request):
                child.logprobs = list(request.logprobs)

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
                now = time.monotonic()
                self._end({request: "deadline" for request in self._open() if now > request.deadline})
                self._slots.admit(self._waiting)
                self._slots.read()
                self._end(self._slots.generate())
            except BaseException as error:
                with self._entering:
                    self.failure = error
                # the requests that came during the step end too
                self._obey()
                self._end(dict.fromkeys(self._open(), error))
                raise
            return bool(self._waiting or self._slots)

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
            self._end(dict.fromkeys(self._open(), "cancelled"))
            return
        self._thread.join(None if grace == math.inf else grace)
        if self._thread.is_alive():
            self._ask(lambda: self._end(dict.fromkeys(self._open(), "cancelled")))
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
            "reading": len(self._slots.reading),
            "running": self._slots.n_running,
        }

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the states of the requests that have a slot, at their end; 0 without `state_bytes`."""
        return self._slots.reserved_bytes

    def room(self, n_prompt: int) -> int:
        """Return the most tokens of an answer to a prompt of so many tokens, at least 1."""
        return self._slots.room(n_prompt)

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
            free = self._slots.slots - len(self._slots)
            if len(self._waiting) + self._n_entering >= self.max_waiting + free:
                raise EngineFull(f"{self.max_waiting} requests wait already; ask again later.")
            self._n_entering += 1
            self._ask(enter)
        return request

    def _open(self) -> list[Request]:
        return [*self._waiting, *self._slots.reading, *self._slots.running]

    def _end(self, ends: Mapping[Request, Ended | BaseException]) -> None:
        """End the open ones of these requests, each for a reason or by an error."""
        ends = {request: why for request, why in ends.items() if request.ended is None}
        if ends:
            self._leave(ends)
        for request, why in ends.items():
            if self.draft is not None:
                self.draft.forget(request)
            error = why if isinstance(why, BaseException) else None
            kind: Ended = "error" if isinstance(why, BaseException) else why
            self.counts[kind] += 1
            request.end(kind, error)

    def _leave(self, requests: Iterable[Request]) -> None:
        """Take requests from where they wait, read or run."""
        self._slots.leave(requests)
        for request in requests:
            if request in self._waiting:
                self._waiting.remove(request)
