"""Streams of symbols: add memory, delay copy, and texts."""

import math
import pydoc_data.topics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from typing_extensions import override

import linrec
from linrec.lab.streams.base import Arrays, Drawn, Regime, Stream, entropy, spans
from linrec.lab.tasks import NO_TARGET
from linrec.rules import at_least, require

__all__ = ["AddMemory", "DelayCopy", "Texts"]


@dataclass(kw_only=True)
class AddMemory(Stream):
    """Coins that depend on earlier coins, with delays that change.

        u_t in {0, 1} fair,    P(y_t = 1) = 1/2 + u_{t-n1} / 2 - u_{t-n2} / 4

    The input of a step is u_t, and the target y_t. Delays change every `every` steps: n1 != n2 uniform in
    `shortest` .. `longest`.

    Args:
        delays: the first n1 and n2.
        every: steps of a regime.
        shortest: smallest delay after the first regime.
        longest: largest delay after the first regime.

    Source: Pitis' task in the form of Marschall, Cho and Savin (2020), A Unified Framework of Online Learning
    Algorithms, with delays 5 and 8.
    """

    delays: tuple[int, int] = (5, 8)
    every: int = 20_000
    shortest: int = 3
    longest: int = 10
    name: ClassVar[str] = "add-memory"
    vocab_size: ClassVar[int | None] = 2
    n_outputs: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, every=self.every, shortest=self.shortest)
        at_least(self.shortest + 1, longest=self.longest)
        require(
            self.delays[0] != self.delays[1] and min(self.delays) >= 1,
            f"`delays` must be two different numbers of steps; got {self.delays}.",
        )

    @property
    @override
    def bounds(self) -> Mapping[str, float]:
        first, second = np.meshgrid([0, 1], [0, 1])
        p = 0.5 + 0.5 * first - 0.25 * second
        return {
            "without memory": entropy(p.mean(keepdims=True)),
            "one delay": entropy(p.mean(0)),
            "both delays": entropy(p),
        }

    @override
    def regimes(self, steps: int) -> list[Regime]:
        return [Regime(start, str(self._delays(i))) for i, start, _ in spans(0, steps, self.every)]

    @override
    def draw(self, start: int, random: np.random.Generator, carried: Arrays) -> tuple[Drawn, Arrays]:
        longest = max(self.longest, *self.delays)
        past = carried.get("coins", np.zeros((self.rows, longest), np.int64))
        coins = np.concatenate([past, random.integers(0, 2, (self.rows, self.block))], 1)
        chance = random.random((self.rows, self.block))
        targets = np.empty((self.rows, self.block), np.int64)
        for i, begin, end in spans(start, start + self.block, self.every):
            n1, n2 = self._delays(i)
            here = np.arange(begin, end) - start
            p = 0.5 + 0.5 * coins[:, here + longest - n1] - 0.25 * coins[:, here + longest - n2]
            targets[:, here] = chance[:, here] < p
        return Drawn(coins[:, longest:], targets), {"coins": coins[:, -longest:]}

    def _delays(self, regime: int) -> tuple[int, int]:
        if regime == 0:
            return self.delays
        n1, n2 = self.random(regime, 1).permutation(np.arange(self.shortest, self.longest + 1))[:2]
        return int(n1), int(n2)


@dataclass(kw_only=True)
class DelayCopy(Stream):
    """Repeat the symbol of D steps ago, where D changes.

        y_t = u_{t-D},    u_t uniform over the symbols

    Args:
        delays: the delays D, one regime after the other, again and again.
        every: steps of a regime.
        symbols: number of symbols.
    """

    delays: tuple[int, ...] = (10, 20, 40)
    every: int = 16_000
    symbols: int = 4
    name: ClassVar[str] = "delay-copy"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, every=self.every, delays=min(self.delays, default=0))
        at_least(2, symbols=self.symbols)

    @property
    def vocab_size(self) -> int:  # type: ignore[override]
        """The number of symbols."""
        return self.symbols

    @property
    def n_outputs(self) -> int:  # type: ignore[override]
        """The number of symbols."""
        return self.symbols

    @property
    @override
    def bounds(self) -> Mapping[str, float]:
        return {"without memory": math.log(self.symbols), "whole memory": 0.0}

    @override
    def regimes(self, steps: int) -> list[Regime]:
        return [Regime(start, f"delay {self._delay(i)}") for i, start, _ in spans(0, steps, self.every)]

    @override
    def draw(self, start: int, random: np.random.Generator, carried: Arrays) -> tuple[Drawn, Arrays]:
        longest = max(self.delays)
        past = carried.get("symbols", np.full((self.rows, longest), NO_TARGET))
        drawn = np.concatenate([past, random.integers(0, self.symbols, (self.rows, self.block))], 1)
        targets = np.empty((self.rows, self.block), np.int64)
        for i, begin, end in spans(start, start + self.block, self.every):
            here = np.arange(begin, end) - start
            targets[:, here] = drawn[:, here + longest - self._delay(i)]
        return Drawn(drawn[:, longest:], targets), {"symbols": drawn[:, -longest:]}

    def _delay(self, regime: int) -> int:
        return self.delays[regime % len(self.delays)]


@dataclass(kw_only=True)
class Texts(Stream):
    """Predict the next byte of a text A, then of a text B, then of another part of A, again and again.

    Without `path`, text A is the reference of the Python language, which every Python brings, and text B is
    the source code of linrec. Row r of b starts at a fraction r / b of each text.

    Args:
        path: a file with text A, such as Shakespeare's works; None is Python's reference.
        every: bytes of each part.
    """

    path: Path | None = None
    every: int = 200_000
    name: ClassVar[str] = "text"
    vocab_size: ClassVar[int | None] = 256
    n_outputs: ClassVar[int] = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, every=self.every)
        if self.path is None:
            topics = pydoc_data.topics.topics
            first = "\n".join(topics[name] for name in sorted(topics)).encode()
        else:
            first = Path(self.path).expanduser().read_bytes()
        files = sorted(Path(linrec.__file__).parent.rglob("*.py"))
        second = b"\n".join(file.read_bytes() for file in files)
        half = len(first) // 2
        require(half > 1, f"`path` must be a text of at least 4 bytes; {self.path} has {len(first)}.")
        self._parts = [np.frombuffer(text, np.uint8) for text in (first[:half], second, first[half:])]

    @property
    def bounds(self) -> Mapping[str, float]:
        """Entropies of the bytes, and of bytes after a byte, of the parts that the stream reads."""
        single, pairs = [], []
        for part in self._parts:
            text = np.resize(part, self.every + 1)
            single.append(_entropy_of(text))
            pairs.append(_entropy_of(text[:-1].astype(np.int64) * 256 + text[1:]) - _entropy_of(text[:-1]))
        return {"bytes": float(np.mean(single)), "pairs of bytes": float(np.mean(pairs))}

    @override
    def regimes(self, steps: int) -> list[Regime]:
        return [Regime(start, "ABA"[i % 3]) for i, start, _ in spans(0, steps, self.every)]

    @override
    def draw(self, start: int, random: np.random.Generator, carried: Arrays) -> tuple[Drawn, Arrays]:
        inputs = np.empty((self.rows, self.block), np.int64)
        targets = np.empty((self.rows, self.block), np.int64)
        for i, begin, end in spans(start, start + self.block, self.every):
            text = self._parts[i % 3]
            # a part that returns continues behind the bytes of its last turn
            first = (i // 3) * self.every + np.arange(self.rows)[:, None] * len(text) // self.rows
            places = first + np.arange(begin, end) - i * self.every
            inputs[:, begin - start : end - start] = text[places % len(text)]
            targets[:, begin - start : end - start] = text[(places + 1) % len(text)]
        return Drawn(inputs, targets), {}


def _entropy_of(values: np.ndarray) -> float:
    _, counts = np.unique(values, return_counts=True)
    p = counts / counts.sum()
    return float(-(p * np.log(p)).sum())
