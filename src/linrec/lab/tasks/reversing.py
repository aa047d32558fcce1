"""Reversing: repeat a string in reverse order.

Source: Delétang and others (2023, arXiv:2207.02098), "Reverse String".
"""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from linrec.lab.tasks.base import NO_TARGET, require_at_least
from linrec.lab.tasks.synthetic import Drawn, SyntheticTask, require_longer_probes

__all__ = ["Reversing"]


@dataclass(frozen=True, kw_only=True)
class Reversing(SyntheticTask):
    """Repeat a string in reverse order.

        x = s_1 .. s_L, marker * L
        y = (no target) * L, s_L .. s_1

    A stack can reverse any string; a state of fixed size can reverse strings up to a maximum length. Tokens
    are the symbols 0 .. `n_symbols` - 1, the marker, and the padding after shorter strings.

    Splits have no strings in common, and there are few short strings. A length is used for validation and
    testing only if its number of strings is at least twice the number of validation and test samples
    together. Training uses all lengths. Scores are grouped by length, and the strings of a probe in
    `test_lengths` all have the same length.

    Args:
        length: maximum number of symbols in a string.
        min_length: minimum number of symbols in a string; lengths are uniform.
        n_symbols: number of distinct symbols.
        fresh: whether every epoch draws new training samples; if not, all epochs share the same samples.

    Raises:
        ValueError: a field is out of range, `test_lengths` are not greater than `length`, or there are too
            few strings for disjoint splits.

    Source: Delétang and others (2023): two symbols, lengths 1 to 40 in training and up to 500 in testing,
        new samples in every batch.

    Example:
        >>> task = Reversing(length=3, min_length=3, n_symbols=9, n_train=1, n_validation=1, n_test=1)
        >>> task.split("test").inputs.tolist(), task.split("test").targets.tolist()
        ([[3, 2, 3, 9, 9, 9]], [[-100, -100, -100, 3, 2, 3]])
    """

    length: int = 40
    min_length: int = 1
    n_symbols: int = 2
    fresh: bool = True
    group_name: ClassVar[str] = "length"

    def __post_init__(self) -> None:
        require_at_least(self, length=1, n_symbols=2)
        if not 1 <= self.min_length <= self.length:
            raise ValueError(f"`min_length` must be in 1 .. `length` = {self.length}; got {self.min_length}.")
        require_longer_probes(self)
        if self.shortest_held_out > self.length:
            raise ValueError(
                f"there must be at least twice as many strings of `length` = {self.length} as `n_validation` "
                f"+ `n_test` = {self.n_validation + self.n_test}; got {self.n_symbols**self.length} strings. "
                "Pass fewer validation and test samples, or a greater length."
            )
        super().__post_init__()

    @property
    def vocab_size(self) -> int:
        """Vocabulary size: symbols, marker, padding."""
        return self.n_symbols + 2

    @property
    def n_outputs(self) -> int:
        """Number of target classes: the symbols."""
        return self.n_symbols

    @property
    def chance(self) -> float:
        """Expected accuracy of a uniform guess among the symbols."""
        return 1 / self.n_symbols

    @cached_property
    def shortest_held_out(self) -> int:
        """Length of the shortest strings for validation and testing; there are too few shorter strings."""
        enough = 2 * (self.n_validation + self.n_test)
        length = self.min_length
        while self.n_symbols**length < enough and length <= self.length:
            length += 1
        return length

    def at_length(self, length: int) -> "Reversing":
        """Return the task with all strings of the same length.

        Args:
            length: number of symbols in every string.
        """
        return dataclasses.replace(self, length=length, min_length=length, test_lengths=())

    def draw(self, random: np.random.Generator, n: int) -> Drawn:
        """Draw n samples of uniformly distributed lengths, padded to 2 * length steps."""
        return self._draw(random, n, self.min_length)

    def draw_held_out(self, random: np.random.Generator, n: int) -> Drawn:
        """Draw n samples of lengths with enough strings for validation and testing."""
        return self._draw(random, n, self.shortest_held_out)

    def _draw(self, random: np.random.Generator, n: int, shortest: int) -> Drawn:
        lengths = random.integers(shortest, self.length + 1, (n, 1))
        step = np.arange(2 * self.length)
        symbols = random.integers(0, self.n_symbols, (n, len(step)))
        marker = self.n_symbols
        inputs = np.where(step < lengths, symbols, np.where(step < 2 * lengths, marker, marker + 1))
        # answers mirror the string at the boundary between string and markers
        mirrored = np.take_along_axis(inputs, np.clip(2 * lengths - 1 - step, 0, None), axis=1)
        targets = np.where((step >= lengths) & (step < 2 * lengths), mirrored, NO_TARGET)
        return Drawn(inputs, targets, np.broadcast_to(lengths, inputs.shape).copy())
