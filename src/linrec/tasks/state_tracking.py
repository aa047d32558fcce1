"""Tasks that ask for the state of a finite automaton after it has read a string.

The protocol is that of Delétang and others (2023, arXiv:2207.02098): train on strings of mixed lengths, test
on longer ones. The splits share no string, and of short ones there are few: eight of three bits. So strings
that validate or test are only of lengths of which there are at least twice as many strings as the two splits
hold together. Training has all shorter strings, and at least half of those of every length.
"""

import abc
import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
from jaxtyping import Int64

from linrec.tasks.base import NO_TARGET, require_at_least
from linrec.tasks.synthetic import Drawn, SyntheticTask, require_longer_probes

Lengths = Int64[np.ndarray, "n"]
Steps = Int64[np.ndarray, "n t"]


@dataclass(frozen=True, kw_only=True)
class StateTracking(SyntheticTask):
    """Base class of tasks with strings of mixed lengths, whose target is a function of the string so far.

    Tokens are the symbols 0 .. `n_symbols` - 1, and the padding `n_symbols` after a string. All strings of a
    probe have one length of `test_lengths`. Scores are grouped by the number of symbols a target depends on.

    Args:
        length: symbols of the longest string.
        min_length: symbols of the shortest string; lengths are drawn uniformly. None is 1; with `dense` it is
            `length`, because every prefix of a string has a target too.
        dense: whether there is a target at every symbol, for the string up to it; else at the last one alone.
        fresh: whether every epoch draws training samples of its own; else they are the same again.

    Raises:
        ValueError: a field is out of range, `test_lengths` are not beyond those of training, or there are too
            few strings for the splits to share none.

    Source: Delétang and others (2023): lengths 1 to 40, and data that is always new, in their released code.
    """

    length: int = 40
    min_length: int | None = None
    dense: bool = False
    fresh: bool = True
    group_name: ClassVar[str] = "length"

    def __post_init__(self) -> None:
        require_at_least(self, n_train=1, n_validation=1, n_test=1, length=1)
        if not 1 <= self.shortest <= self.length:
            raise ValueError(f"`min_length` must be in 1 .. `length` = {self.length}; got {self.min_length}.")
        require_longer_probes(self)
        if self.shortest_held_out > self.length:
            raise ValueError(
                f"{type(self).__name__} has too few different samples: of `length` = {self.length} there are "
                f"{self.n_strings(self.length)} strings, and there must be at least twice as many as "
                f"`n_validation` and `n_test` together, {self.n_validation + self.n_test}. "
                "Ask for fewer, or for longer strings."
            )
        super().__post_init__()

    @property
    @abc.abstractmethod
    def n_symbols(self) -> int:
        """Number of different symbols."""

    @abc.abstractmethod
    def n_strings(self, length: int) -> int:
        """Count the strings of a length; at most that of the next length."""

    @abc.abstractmethod
    def strings(self, random: np.random.Generator, lengths: Lengths) -> tuple[Steps, Steps]:
        """Draw strings.

        Args:
            random: where they come from.
            lengths: that of each string, shape (n), int64, at most `length`.

        Returns:
            Symbols and answers, both (n, `length`), int64. The answer at a step is that of the string up to
            it, -100 where it has none; what comes after a string is of no account.
        """

    def existing(self, lengths: Lengths) -> Lengths:
        """Return the greatest lengths up to these that strings have: these, where strings have all."""
        return lengths

    @property
    def vocab_size(self) -> int:
        """Number of input tokens: symbols and padding."""
        return self.n_symbols + 1

    @property
    def chance(self) -> float:
        """Expected accuracy of a uniform guess among the answers."""
        return 1 / self.n_outputs

    @property
    def shortest(self) -> int:
        """Symbols of the shortest string."""
        if self.min_length is not None:
            return self.min_length
        return self.length if self.dense else 1

    @cached_property
    def shortest_held_out(self) -> int:
        """Symbols of the shortest string that validates or tests: of shorter ones there are too few."""
        enough = 2 * (self.n_validation + self.n_test)
        lengths = range(self.shortest, self.length + 1)
        return next((length for length in lengths if self.n_strings(length) >= enough), self.length + 1)

    def at_length(self, length: int) -> "StateTracking":
        """Return the same task with all strings of one length.

        Args:
            length: symbols of every string.
        """
        return dataclasses.replace(self, length=length, min_length=length, test_lengths=())

    def draw(self, random: np.random.Generator, n: int) -> Drawn:
        """Draw n strings of uniformly distributed lengths, padded to `length` steps."""
        return self._draw(random, n, self.shortest)

    def draw_held_out(self, random: np.random.Generator, n: int) -> Drawn:
        """Draw n strings of lengths of which there are enough."""
        return self._draw(random, n, self.shortest_held_out)

    def _draw(self, random: np.random.Generator, n: int, shortest: int) -> Drawn:
        lengths = self.existing(random.integers(shortest, self.length + 1, n))
        symbols, answers = self.strings(random, lengths)
        read = np.arange(1, self.length + 1)
        inside = read <= lengths[:, None]
        asked = inside if self.dense else read == lengths[:, None]
        return Drawn(
            np.where(inside, symbols, self.n_symbols),
            np.where(asked, answers, NO_TARGET),
            np.broadcast_to(read, symbols.shape).copy(),
        )
