"""A request to the engine: its prompt, its options, and the tokens generated so far."""

import dataclasses
import functools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float
from torch import Tensor

from linrec.generation.noise import check_seed, uniforms
from linrec.generation.sampling import Sampling
from linrec.mixers import State
from linrec.rules import at_least, positive

if TYPE_CHECKING:
    from linrec.serve.engine import Engine

__all__ = ["Ended", "LogProb", "Observer", "Process", "Request", "RequestError"]

Ended: TypeAlias = Literal["length", "stop", "cancelled", "deadline", "error"]
Process: TypeAlias = Callable[[Sequence[int], Float[Tensor, "v"]], Float[Tensor, "v"]]
Observer: TypeAlias = Callable[["Request", State], None]

# random numbers that are drawn at once
BLOCK = 64
# seconds after which a reader looks whether the engine still runs
PATIENCE = 0.5
MOST_LOGPROBS = 20


class LogProb(NamedTuple):
    """The log probability of a token, and the likeliest tokens in its place.

    Attributes:
        value: log p of the token by the model itself, at temperature 1 and before `process`.
        top: log p of the likeliest tokens by token id, the likeliest first.
    """

    value: float
    top: dict[int, float]


class RequestError(RuntimeError):
    """A request that ended by an error, such as logits that are not finite."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a request is answered; see `Engine.submit`."""

    n_tokens: int
    sampling: Sampling
    seed: int = 0
    stop: frozenset[int] = frozenset()
    seconds: float = math.inf
    process: Process | None = None
    observer: Observer | None = None
    logprobs: int | None = None
    echo: bool = False
    salt: str = ""

    def __post_init__(self) -> None:
        at_least(1, n_tokens=self.n_tokens)
        check_seed(self.seed)
        at_least(0, most=MOST_LOGPROBS, logprobs=self.logprobs, or_none=True)
        if self.seconds != math.inf:
            positive(seconds=self.seconds)

    @functools.cached_property
    def is_plain(self) -> bool:
        """Whether tokens are drawn from all, without filters of logits."""
        return self.process is None and self.sampling.top_k is None and self.sampling.top_p in (None, 1)

    @functools.cached_property
    def runs_ahead(self) -> bool:
        """Whether the next step may begin before the tokens of a step are looked at."""
        return self.is_plain and self.observer is None and self.logprobs is None


@dataclass(eq=False)
class Request:
    """A prompt and its continuation, made by `Engine.submit`.

    Iterate over a request for its tokens as they come. Where no thread runs the engine, the iteration takes
    the engine's steps, for all requests.

    Attributes:
        tokens: tokens of the prompt and the generated tokens.
        n_prompt: number of tokens of the prompt.
        options: how the request is answered.
        read: number of tokens that the state has read.
        cached: number of tokens of the prompt whose state was in the prefix tree.
        ended: why the request ended, None before: "length", "stop" for a token of `stop`, "cancelled",
            "deadline" or "error".
        error: the exception that ended the request.
        logprobs: log probabilities of the generated tokens, where they were asked for; with `echo`, of all
            tokens but the first.
        times: seconds of `time.monotonic` at which it was submitted, had its first token, and ended.
    """

    engine: "Engine"
    tokens: list[int]
    n_prompt: int
    options: Options
    listener: Callable[["Request"], None] | None = None
    read: int = 0
    cached: int = 0
    ended: Ended | None = None
    error: BaseException | None = None
    logprobs: list[LogProb] = field(default_factory=list)
    times: dict[str, float] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _waiters: int = 0
    _given: int = 0
    _target: int | None = None
    _drawn: np.ndarray | None = None
    _from: int = 0

    def __post_init__(self) -> None:
        self.times["submitted"] = time.monotonic()

    @property
    def generated(self) -> list[int]:
        """The generated tokens."""
        return self.tokens[self.n_prompt :]

    @property
    def unread(self) -> int:
        """Number of tokens to read before the next token can be generated, without the newest token."""
        return len(self.tokens) - 1 - self.read

    @property
    def deadline(self) -> float:
        """The time at which the request is cut off."""
        return self.times["submitted"] + self.options.seconds

    @property
    def complete(self) -> Ended | None:
        """Why the answer is complete; None if it is not."""
        count = len(self.tokens) - self.n_prompt
        if count and self.tokens[-1] in self.options.stop:
            return "stop"
        return "length" if count >= self.options.n_tokens else None

    @property
    def scores_prompt(self) -> bool:
        """Whether log probabilities of the prompt are still to be computed."""
        return self.options.echo and len(self.logprobs) < self.n_prompt - 1

    def accepted(self, chosen: Sequence[int], drafted: Sequence[int], valid: int) -> list[int]:
        """Return the new tokens: the chosen tokens up to the first that differs from the draft.

        Args:
            chosen: the choice after the newest token, and after each token of the draft.
            drafted: the tokens of the draft.
            valid: number of choices that are from finite logits.
        """
        if not drafted:
            return list(chosen[:1])
        agree = takewhile(lambda pair: pair[0] == pair[1], zip(chosen, drafted, strict=False))
        most = min(1 + len(list(agree)), valid, self.n_prompt + self.options.n_tokens - len(self.tokens))
        if self.options.process is not None:
            # it has seen the logits of one token alone
            most = 1
        stops = (n for n, token in enumerate(chosen[:most], 1) if token in self.options.stop)
        return list(chosen[: next(stops, most)])

    def score(self, logits: Float[Tensor, "n v"], tokens: Sequence[int]) -> None:
        """Keep the log probabilities of successive tokens from their logits, if they were asked for."""
        if self.options.logprobs is None or not tokens:
            return
        found = logits[: len(tokens)].double().log_softmax(-1)
        top = found.topk(min(self.options.logprobs, found.shape[1]))
        for row, token in enumerate(tokens):
            likeliest = dict(zip(top.indices[row].tolist(), top.values[row].tolist(), strict=True))
            self.logprobs.append(LogProb(float(found[row, token]), likeliest))

    def observed(self, state: State) -> Exception | None:
        """Show the state to the observer; return the observer's error."""
        try:
            if self.options.observer is not None:
                self.options.observer(self, state)
        except Exception as error:
            return error
        return None

    def extend(self, tokens: Sequence[int]) -> Exception | None:
        """Append generated tokens; return the listener's error."""
        self.times.setdefault("first", time.monotonic())
        self.tokens += tokens
        return self._told()

    def revive(self, n_tokens: int) -> int:
        """Prepare to take back tokens, also of a request that has ended; return the number of tokens left."""
        with self._changed:
            tokens = len(self.tokens) if self._target is None else self._target
            generated = tokens - self.n_prompt
            at_least(1, most=generated, n_tokens=n_tokens, cure="It counts generated tokens.")
            self._target, self.ended, self.error = tokens - n_tokens, None, None
            self._given = min(self._given, generated - n_tokens)
        return tokens - n_tokens

    def cut(self, length: int, seed: int | None) -> None:
        """Go back to fewer tokens, and wait again."""
        with self._changed:
            gone = len(self.tokens) - length
            del self.tokens[length:], self.logprobs[max(0, len(self.logprobs) - gone) :]
            if self._target == length:
                self._target = None
            self.read, self.ended, self.error, self._drawn = 0, None, None, None
            self.times["submitted"] = time.monotonic()
        if seed is not None:
            self.options = dataclasses.replace(self.options, seed=seed)

    def end(self, why: Ended, error: BaseException | None = None) -> None:
        """End the request."""
        self.ended, self.error, self.times["ended"] = why, error, time.monotonic()
        self._told()

    def _told(self) -> Exception | None:
        # a thread that comes to wait has counted itself before it looks for tokens
        if self._waiters:
            with self._changed:
                self._changed.notify_all()
        if self.listener is None:
            return None
        try:
            self.listener(self)
        except Exception as error:
            return error
        return None

    def uniform(self, ahead: int = 0) -> float:
        """Return the random number of the next token, or of the token `ahead` of it."""
        index = len(self.tokens) - self.n_prompt + ahead
        if self._drawn is None or not self._from <= index < self._from + BLOCK:
            # the first row of a batch: `generate` draws the same numbers for the prompt alone
            self._drawn, self._from = uniforms(self.options.seed, 0, index, BLOCK), index
        return float(self._drawn[index - self._from])

    def result(self) -> list[int]:
        """Return all generated tokens after the request has ended.

        Raises:
            RequestError: the request ended by an error.
        """
        for _ in self:
            pass
        return self.generated

    def __iter__(self) -> Iterator[int]:
        """Yield the tokens that have not been yielded yet, until the request has ended."""
        while (token := self._next()) is not None:
            yield token
        if self.error is not None:
            raise RequestError(f"the request ended by an error: {self.error}") from self.error

    def _next(self) -> int | None:
        while True:
            with self._changed:
                self._waiters += 1
                try:
                    place = self.n_prompt + self._given
                    # tokens that are being taken back are not given
                    if place < len(self.tokens) and (self._target is None or place < self._target):
                        self._given += 1
                        return self.tokens[place]
                    if self.ended is not None:
                        return None
                    if self.engine.is_running:
                        self._changed.wait(PATIENCE)
                        continue
                finally:
                    self._waiters -= 1
            self.engine.step()
