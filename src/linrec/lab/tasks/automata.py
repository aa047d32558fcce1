"""Tasks of automata: the state of an automaton after reading a string of mixed length.

The protocol follows Delétang and others (2023, arXiv:2207.02098): train on strings of mixed lengths, test on
longer strings, with new samples in every batch. Splits have no strings in common, and there are few short
strings: only eight of three bits. A length is used for validation and testing only if its number of strings
is at least twice the number of validation and test samples together. Training has all shorter strings, and at
least half of the strings of every length.
"""

import abc
import dataclasses
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from linrec.lab.tasks.base import NO_TARGET, SplitName
from linrec.lab.tasks.fields import CheckedTask
from linrec.lab.tasks.labelled import ClassificationTask, LabelledSeries
from linrec.lab.tasks.synthetic import Alphabet, Drawn, SyntheticTask, require_longer_probes

__all__ = ["CycleNavigation", "EvenPairs", "EventXor", "Parity", "StateTracking", "StringTask", "WordProblem"]

Lengths = Int64[np.ndarray, "n"]
Steps = Int64[np.ndarray, "n t"]

MOVES = np.array([0, 1, -1])
UNIT = 32
"""Number of bits in a unit of time, as in the released code."""
# the largest number for each kind of group; S6 has 720 elements
MOST = {"S": 6, "A": 6, "Z": 1000}


@dataclass(frozen=True, kw_only=True)
class StringTask(SyntheticTask):
    """Base class of tasks with strings of mixed lengths; splits have no strings in common.

    A subclass defines `alphabet`, `n_symbols` and `draw_from`. The strings of a probe in `test_lengths` all
    have the same length.

    Args:
        length: maximum number of symbols in a string.
        min_length: minimum number of symbols in a string; lengths are uniform.
    """

    length: int = 40
    min_length: int | None = 1
    fresh: bool = True
    group_name: ClassVar[str] = "length"
    least: ClassVar[Mapping[str, int]] = {"length": 1}

    def check(self) -> None:
        """Require a range of lengths, longer probes, and enough strings for disjoint splits."""
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

    @property
    @abc.abstractmethod
    def n_symbols(self) -> int:
        """Number of distinct symbols."""

    @abc.abstractmethod
    def draw_from(self, random: np.random.Generator, n: int, shortest: int) -> Drawn:
        """Draw n samples of uniformly distributed lengths from `shortest` to `length`."""

    def n_strings(self, length: int) -> int:
        """Return the number of strings of a length, which must not decrease with the length."""
        return self.n_symbols**length

    @property
    def shortest(self) -> int:
        """Length of the shortest strings."""
        return 1 if self.min_length is None else self.min_length

    @cached_property
    def shortest_held_out(self) -> int:
        """Length of the shortest strings for validation and testing; there are too few shorter strings."""
        enough = 2 * (self.n_validation + self.n_test)
        lengths = range(self.shortest, self.length + 1)
        return next((length for length in lengths if self.n_strings(length) >= enough), self.length + 1)

    def at_length(self, length: int) -> "StringTask":
        """Return the task with all strings of the same length."""
        return dataclasses.replace(self, length=length, min_length=length, test_lengths=())

    def draw(self, random: np.random.Generator, n: int) -> Drawn:
        """Draw n strings of uniformly distributed lengths, with padding after them."""
        return self.draw_from(random, n, self.shortest)

    def draw_held_out(self, random: np.random.Generator, n: int) -> Drawn:
        """Draw n strings of lengths with enough strings for validation and testing."""
        return self.draw_from(random, n, self.shortest_held_out)


@dataclass(frozen=True, kw_only=True)
class StateTracking(StringTask):
    """Base class of tasks whose target is a function of the string so far; a subclass defines `strings`.

    Tokens are the symbols 0 .. `n_symbols` - 1, and the padding `n_symbols` after a string. Scores are
    grouped by the number of symbols that a target depends on.

    Args:
        min_length: minimum number of symbols in a string; lengths are uniform. None is 1, or `length` with
            `dense`, because every prefix of a string then has a target.
        dense: whether every symbol has a target, for the string up to this symbol; if not, only the last
            symbol has a target.
    """

    min_length: int | None = None
    dense: bool = False

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
    def n_symbols(self) -> int:
        """Number of distinct symbols: all tokens but the padding."""
        return self.alphabet.tokens - 1

    @property
    def shortest(self) -> int:
        """Length of the shortest strings."""
        return self.length if self.dense and self.min_length is None else super().shortest

    def draw_from(self, random: np.random.Generator, n: int, shortest: int) -> Drawn:
        """Draw n samples of uniformly distributed lengths from `shortest` to `length`."""
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


@dataclass(frozen=True, kw_only=True)
class Parity(StateTracking):
    """Count the ones in a string modulo 2, or modulo another number.

        y = x_1 + ... + x_L   (mod modulus)

    Tokens are the bits 0 and 1, and the padding 2.

    Args:
        modulus: modulus of the count.

    Source: Delétang and others (2023), "Parity Check". Grazzi and others (2024, arXiv:2411.12537) count
    modulo other numbers: linear recurrences with real, positive eigenvalues cannot compute the parity of long
    strings, and linear recurrences with real eigenvalues cannot count modulo 3.

    Example:
        >>> task = Parity(length=7, min_length=5, n_train=1, n_validation=1, n_test=1)
        >>> task.split("test").inputs.tolist(), task.split("test").targets.tolist()
        ([[1, 1, 1, 1, 1, 1, 2]], [[-100, -100, -100, -100, -100, 0, -100]])
    """

    modulus: int = 2
    least: ClassVar[Mapping[str, int]] = {"modulus": 2}

    @property
    def alphabet(self) -> Alphabet:
        """Two bits, padding; the answers are remainders."""
        return Alphabet(3, self.modulus, self.modulus)

    def strings(self, random: np.random.Generator, lengths: Lengths) -> tuple[Steps, Steps]:
        """Draw bits; the answer at a step is the sum so far."""
        bits = random.integers(0, 2, (len(lengths), self.length))
        return bits, bits.cumsum(1) % self.modulus


@dataclass(frozen=True, kw_only=True)
class EvenPairs(StateTracking):
    """Tell whether the number of changes in a string is odd; equivalently, whether its ends differ.

        y = [x_1 != x_2] + ... + [x_{L-1} != x_L]   (mod 2)   =   [x_1 != x_L]

    Tokens are the bits 0 and 1, and the padding 2. A model may count the changes, or keep the first symbol.

    Source: Delétang and others (2023), "Even Pairs": the pairs 01 and 10 are counted together.

    Example:
        >>> task = EvenPairs(length=7, min_length=5, n_train=1, n_validation=1, n_test=1)
        >>> task.split("test").inputs.tolist(), task.split("test").targets.tolist()
        ([[1, 0, 1, 1, 1, 2, 2]], [[-100, -100, -100, -100, 0, -100, -100]])
    """

    @property
    def alphabet(self) -> Alphabet:
        """Two bits, padding; the answers are 0 even, 1 odd."""
        return Alphabet(3, 2, 2)

    def strings(self, random: np.random.Generator, lengths: Lengths) -> tuple[Steps, Steps]:
        """Draw bits; the answer at a step is 1 if its symbol differs from the first symbol."""
        bits = random.integers(0, 2, (len(lengths), self.length))
        return bits, bits ^ bits[:, :1]


@dataclass(frozen=True, kw_only=True)
class CycleNavigation(StateTracking):
    """Add up moves on a circle, starting from place 0.

        y = m(x_1) + ... + m(x_L)   (mod n_places),   m(0) = 0, m(1) = 1, m(2) = -1

    Tokens are the moves 0 (stay), 1 (forward) and 2 (backward), and the padding 3.

    Args:
        n_places: number of places on the circle.

    Source: Delétang and others (2023), "Cycle Navigation", on a circle of five places.

    Example:
        >>> task = CycleNavigation(length=6, min_length=4, n_train=1, n_validation=1, n_test=1)
        >>> task.split("test").inputs.tolist(), task.split("test").targets.tolist()
        ([[0, 2, 0, 1, 0, 3]], [[-100, -100, -100, -100, 0, -100]])
    """

    n_places: int = 5
    least: ClassVar[Mapping[str, int]] = {"n_places": 2}

    @property
    def alphabet(self) -> Alphabet:
        """Three moves, padding; the answers are places."""
        return Alphabet(len(MOVES) + 1, self.n_places, self.n_places)

    def strings(self, random: np.random.Generator, lengths: Lengths) -> tuple[Steps, Steps]:
        """Draw moves; the answer at a step is the place after it."""
        moves = random.integers(0, len(MOVES), (len(lengths), self.length))
        return moves, MOVES[moves].cumsum(1) % self.n_places


@dataclass(frozen=True, kw_only=True)
class WordProblem(StateTracking):
    """Multiply a string of group elements.

        y_t = x_t x_{t-1} ... x_1

    Thus y_t = x_t y_{t-1}. A permutation p is the function i -> p(i), and the right factor of a product is
    applied first. Tokens are the indices of the elements, followed by the padding. Elements are permutations
    in lexicographic order (only even permutations for A), or rotations by the index for Z, so that 0 is the
    identity. `dense` is True by default.

    Args:
        group: name of the group, such as "S5": S is symmetric, A alternating (both of at most 6 letters), Z
            cyclic.

    Source: Merrill, Petty and Sabharwal (2024, arXiv:2404.08819), with a target at every step. The word
    problem of S5, and of every group that is not solvable, is complete for NC1 (Barrington 1989). State-space
    models with diagonal transitions and attention are in TC0. S3, S4, A4 and Zn are solvable.

    Example:
        >>> task = WordProblem(group="Z3", length=6, n_train=1, n_validation=1, n_test=1)
        >>> task.split("test").inputs.tolist(), task.split("test").targets.tolist()
        ([[1, 0, 2, 0, 2, 1]], [[1, 1, 0, 0, 2, 0]])
        >>> WordProblem(group="S3").elements.tolist()
        [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]]
    """

    dense: bool = True
    group: str = "S5"

    @property
    def alphabet(self) -> Alphabet:
        """All elements, padding; the answers are elements."""
        size = len(self.elements)
        return Alphabet(size + 1, size, size)

    def check(self) -> None:
        """Require the name of a group."""
        name = re.fullmatch(r"([SAZ])(\d{1,4})", self.group)
        if name is None or not (3 if name[1] == "A" else 2) <= int(name[2]) <= MOST[name[1]]:
            raise ValueError(
                f"`group` must be one of S2 .. S{MOST['S']}, A3 .. A{MOST['A']} and Z2 .. Z{MOST['Z']}; "
                f"got {self.group!r}."
            )
        super().check()

    @cached_property
    def elements(self) -> Int64[np.ndarray, "g letters"]:
        """The elements as permutations, with p(0), p(1), ... in a row."""
        letters = np.arange(int(self.group[1:]))
        if self.group[0] == "Z":
            return (letters[:, None] + letters) % len(letters)
        permutations = np.array(list(itertools.permutations(letters)))
        if self.group[0] == "S":
            return permutations
        inversions = sum(
            permutations[:, i] > permutations[:, j] for i, j in itertools.combinations(letters, 2)
        )
        return permutations[inversions % 2 == 0]

    @cached_property
    def products(self) -> Int64[np.ndarray, "g g"]:
        """The multiplication table: the index of p q in row p and column q."""
        # six letters identify all elements: permutations have at most six, and rotations need only the first
        letters = self.elements[:, :6]
        weights = self.elements.shape[1] ** np.arange(letters.shape[1])[::-1]
        # the codes are sorted, because elements are in lexicographic order
        codes = letters @ weights
        return np.searchsorted(codes, self.elements[:, letters] @ weights)

    def strings(self, random: np.random.Generator, lengths: Lengths) -> tuple[Steps, Steps]:
        """Draw elements; the answer at a step is the product so far."""
        elements = random.integers(0, self.n_symbols, (len(lengths), self.length))
        answers = elements.copy()
        for t in range(1, self.length):
            answers[:, t] = self.products[elements[:, t], answers[:, t - 1]]
        return elements, answers


@dataclass(frozen=True, kw_only=True)
class EventXor(CheckedTask, ClassificationTask):
    """Tell whether the number of ones is odd in a bit string that is given as events.

        x_i = (b_{t_i}, (t_i - t_{i-1}) / 32),   t_0 = 0,   y = b_1 + ... + b_L   (mod 2)

    The events t_1 < t_2 < ... are the first bit, every change, and the last bit. The second feature is the
    time since the event before. Sequences are padded to `length` steps, and batches contain the lengths.

    The strings are drawn by `Parity`.

    Args:
        length: greatest number of bits L; L is uniform on 2 .. `length`.
        dense: whether every bit is an event.
        with_dt: whether batches have `dt`, for mixers that take irregular steps: the number of bits since the
            event before, and 1 at the first event. It is a feature too.
        n_train: number of training samples.
        n_validation: number of validation samples.
        n_test: number of test samples.
        seed: seed of the data only.

    Source: Lechner and Hasani (2020, arXiv:2006.04418), and the released code of CfC (Hasani and others 2022,
    arXiv:2106.13898): strings of 2 to 31 bits, 100,000 for training and 10,000 for testing. There, `dt` is 32
    times smaller, test strings may also be training strings, and so may the shortest strings be test strings.

    Example:
        >>> task = EventXor(length=7, n_train=1, n_validation=1, n_test=1)
        >>> batch = task.split("test").rows(torch.tensor([0]))
        >>> (32 * batch.inputs[0, :, 1]).int().tolist(), batch.lengths.tolist()
        ([1, 4, 0, 0, 0, 0, 0], [2])
    """

    length: int = 31
    dense: bool = False
    with_dt: bool = False
    n_train: int = 100_000
    n_validation: int = 1_000
    n_test: int = 10_000
    seed: int = 0
    section: ClassVar[str] = "task"
    vocab_size: ClassVar[int | None] = None
    n_features: ClassVar[int | None] = 2
    n_outputs: ClassVar[int] = 2
    least: ClassVar[Mapping[str, int]] = {"length": 2}

    def check(self) -> None:
        """Check the fields by the task of the strings."""
        self.strings()

    def split(self, name: SplitName) -> LabelledSeries:
        """Return the samples of a split."""
        if name not in self._drawn:
            strings = self.strings().split(name)
            split = events(strings.inputs, strings.targets.amax(1), dense=self.dense)
            self._drawn[name] = dataclasses.replace(split, unit=1 / UNIT if self.with_dt else None)
        return self._drawn[name]

    def strings(self) -> Parity:
        """Return the task that draws the strings of bits and their parities."""
        sizes: dict[str, Any] = {name: getattr(self, name) for name in ("n_train", "n_validation", "n_test")}
        return Parity(length=self.length, min_length=2, fresh=False, seed=self.seed, **sizes)

    @cached_property
    def _drawn(self) -> dict[SplitName, LabelledSeries]:
        return {}


def events(bits: Int64[Tensor, "n t"], labels: Int64[Tensor, "n"], *, dense: bool) -> LabelledSeries:
    """Return strings of bits as events.

    Args:
        bits: strings, each followed by padding with another number than 0 and 1.
        labels: class of each string.
        dense: whether every bit is an event; if not, the first bit, every change and the last bit are.
    """
    inside = bits <= 1
    kept = inside.clone()
    if not dense:
        kept[:, 1:] &= bits[:, 1:] != bits[:, :-1]
        kept[torch.arange(len(bits)), inside.sum(1) - 1] = True
    # the places of the events come first, in their order
    place = (~kept).int().argsort(dim=1, stable=True)
    elapsed = torch.diff(place + 1, dim=1, prepend=torch.zeros(len(bits), 1, dtype=torch.int64))
    values = torch.stack([bits.gather(1, place), elapsed / UNIT], dim=-1).float()
    return LabelledSeries(values, labels, torch.zeros(1, 2), torch.ones(1, 2), kept.sum(1))
