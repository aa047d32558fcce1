"""The interface of streams: endless, drawn from a seed in blocks, resumed at any step."""

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
import torch
from jaxtyping import Float

from linrec.learning import Piece
from linrec.rules import at_least

__all__ = ["Arrays", "Drawn", "Regime", "Stream"]

Arrays: TypeAlias = dict[str, np.ndarray]
"""Arrays that a stream carries from one block to the next."""


class Drawn(NamedTuple):
    """A block of a stream: tokens (b, n) int64 or features (b, n, f) float32, and targets.

    Targets are classes (b, n) int64, or reals (b, n, m) float32. Steps with -100 or NaN have no target.
    """

    inputs: np.ndarray
    targets: np.ndarray


class Regime(NamedTuple):
    """A span of a stream under one rule.

    Args:
        start: its first step.
        name: the rule; a name that comes again is a rule that returns.
    """

    start: int
    name: str


@dataclass(kw_only=True)
class Stream(ABC):
    """An endless stream of independent rows, a pure function of its fields.

    Blocks are drawn one after the other, each from the seed, the block's number, and the arrays that the
    block before carries on. So a stream resumes at any step, and does not depend on how many steps are read
    at a time.

    Args:
        rows: number of rows b.
        seed: seed of the stream.
    """

    rows: int = 1
    seed: int = 0
    name: ClassVar[str]
    vocab_size: ClassVar[int | None] = None
    n_features: ClassVar[int | None] = None
    n_outputs: ClassVar[int]
    block: ClassVar[int] = 1000
    """Steps of a block."""

    _at: int = field(default=0, init=False, repr=False)
    _number: int = field(default=-1, init=False, repr=False)
    _drawn: Drawn | None = field(default=None, init=False, repr=False)
    _before: Arrays = field(default_factory=dict, init=False, repr=False)
    _after: Arrays = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        at_least(1, rows=self.rows)
        at_least(0, seed=self.seed)

    @property
    def step(self) -> int:
        """The number of the next step."""
        return self._at

    def read(self, n: int) -> Piece:
        """Return the next n steps."""
        at_least(1, n=n)
        parts: list[Drawn] = []
        while n:
            offset = self._at % self.block
            drawn = self._block_of(self._at // self.block)
            taken = min(n, self.block - offset)
            parts.append(Drawn(*(array[:, offset : offset + taken] for array in drawn)))
            self._at, n = self._at + taken, n - taken
        inputs, targets = (np.concatenate(arrays, 1) for arrays in zip(*parts, strict=True))
        return Piece(torch.from_numpy(inputs), torch.from_numpy(targets))

    def state_dict(self) -> dict[str, Any]:
        """Return the step, the number of its block, and the arrays at the block's start."""
        return {"step": self._at, "block": self._number, "carried": dict(self._before)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at the place of another stream with the same fields."""
        self._at, self._drawn = state["step"], None
        self._after = {name: np.array(array) for name, array in state["carried"].items()}
        # no block is drawn before the first step
        self._number = max(state["block"] - 1, -1)
        if state["block"] >= 0:
            self._block_of(state["block"])

    def regimes(self, steps: int) -> list[Regime]:
        """Return the regimes of the first steps, in order; one for a stream without drifts."""
        return [Regime(0, self.name)]

    @property
    def bounds(self) -> Mapping[str, float]:
        """Losses of simple predictors, by a short description; the first predictor has no memory."""
        return {}

    @abstractmethod
    def draw(self, start: int, random: np.random.Generator, carried: Arrays) -> tuple[Drawn, Arrays]:
        """Return the block that starts at a step, and the arrays that the next block needs.

        Args:
            start: number of the block's first step.
            random: the block's generator.
            carried: the arrays that the block before returned; empty at the start.
        """

    def random(self, *numbers: int) -> np.random.Generator:
        """Return the generator of a block, or of another part of the stream, by its numbers."""
        return np.random.default_rng([self.seed, zlib.crc32(self.name.encode()), self.rows, *numbers])

    def _block_of(self, number: int) -> Drawn:
        if self._drawn is None or number != self._number:
            assert number == self._number + 1
            self._number, self._before = number, self._after
            self._drawn, self._after = self.draw(number * self.block, self.random(number), dict(self._before))
        return self._drawn


def entropy(probability: Float[np.ndarray, "*n"]) -> float:
    """Return the mean entropy in nats of coins with these probabilities."""
    p = np.asarray(probability)
    terms = (-q * np.log(np.where(q > 0, q, 1)) for q in (p, 1 - p))
    return float(np.mean(sum(terms)))


def spans(start: int, stop: int, every: int) -> list[tuple[int, int, int]]:
    """Return (number, start, stop) of the regimes of equal length in a range of steps, cut to the range."""
    first, last = start // every, math.ceil(stop / every)
    return [(i, max(start, i * every), min(stop, (i + 1) * every)) for i in range(first, last)]
