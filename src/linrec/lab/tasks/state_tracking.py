"""Base class of tasks whose targets are the state of an automaton after reading a string.

The protocol follows Delétang and others (2023, arXiv:2207.02098): train on strings of mixed lengths, test on
longer strings. Splits have no strings in common, and there are few short strings: only eight of three bits. A
length is used for validation and testing only if its number of strings is at least twice the number of
validation and test samples together. Training has all shorter strings, and at least half of the strings of
every length.
"""

import abc
import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
from jaxtyping import Int64

from linrec.lab.tasks.base import NO_TARGET, require_at_least
from linrec.lab.tasks.synthetic import Drawn, SyntheticTask, require_longer_probes

Lengths = Int64[np.ndarray, "n"]
Steps = Int64[np.ndarray, "n t"]


@dataclass(frozen=True, kw_only=True)
class StateTracking(SyntheticTask):
    """Base class of tasks with strings of mixed lengths, whose target is a function of the string so far.

    Tokens are the symbols 0 .. `n_symbols` - 1, and the padding `n_symbols` after a string. The strings of a
    probe in `test_lengths` all have the same length. Scores are grouped by the number of symbols that a
    target depends on.

    Args:
        length: maximum number of symbols in a string.
        min_length: minimum number of symbols in a string; lengths are uniform. None is 1, or `length` with
            `dense`, because every prefix of a string then has a target.
        dense: whether every symbol has a target, for the string up to this symbol; if not, only the last
            symbol has a target.
        fresh: whether every epoch draws new training samples; if not, all epochs share the same samples.

    Raises:
        ValueError: a field is out of range, `test_lengths` are not greater than `length`, or there are too
            few strings for disjoint splits.

    Source: Delétang and others (2023): lengths 1 to 40, and new samples in every batch, in the released code.
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
                f"{type(self).__name__} has too few different samples: there must be at least twice as many "
                f"strings of `length` = {self.length} as `n_validation` + `n_test` = "
                f"{self.n_validation + self.n_test}; got {self.n_strings(self.length)} strings. "
                "Pass fewer validation and test samples, or a greater length."
            )
        super().__post_init__()

    @property
    @abc.abstractmethod
    def n_symbols(self) -> int:
        """Number of distinct symbols."""

    @abc.abstractmethod
    def n_strings(self, length: int) -> int:
        """Return the number of strings of a length; must not decrease with the length."""

    @abc.abstractmethod
    def strings(self, random: np.random.Generator, lengths: Lengths) -> tuple[Steps, Steps]:
        """Draw strings.

        Args:
            random: the random generator.
            lengths: length of each string, shape (n), int64, at most `length`.

        Returns:
            Symbols and answers, both (n, `length`), int64. The answer at a step is the answer for the string
            up to this step, or -100 without an answer. Values after the end of a string are ignored.
        """

    def existing(self, lengths: Lengths) -> Lengths:
        """Return, for each length, the greatest valid length up to it; by default, all lengths are valid."""
        return lengths

    @property
    def vocab_size(self) -> int:
        """Vocabulary size: symbols and padding."""
        return self.n_symbols + 1

    @property
    def chance(self) -> float:
        """Expected accuracy of a uniform guess among the answers."""
        return 1 / self.n_outputs

    @property
    def shortest(self) -> int:
        """Length of the shortest strings."""
        if self.min_length is not None:
            return self.min_length
        return self.length if self.dense else 1

    @cached_property
    def shortest_held_out(self) -> int:
        """Length of the shortest strings for validation and testing; there are too few shorter strings."""
        enough = 2 * (self.n_validation + self.n_test)
        lengths = range(self.shortest, self.length + 1)
        return next((length for length in lengths if self.n_strings(length) >= enough), self.length + 1)

    def at_length(self, length: int) -> "StateTracking":
        """Return the task with all strings of the same length.

        Args:
            length: number of symbols in every string.
        """
        return dataclasses.replace(self, length=length, min_length=length, test_lengths=())

    def draw(self, random: np.random.Generator, n: int) -> Drawn:
        """Draw n strings of uniformly distributed lengths, padded to `length` steps."""
        return self._draw(random, n, self.shortest)

    def draw_held_out(self, random: np.random.Generator, n: int) -> Drawn:
        """Draw n strings of lengths with enough strings for validation and testing."""
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
