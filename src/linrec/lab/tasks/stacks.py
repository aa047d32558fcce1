"""Tasks of stacks: values of expressions, with or without brackets, and strings in reverse order.

The protocol of strings and splits is that of `automata.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Int64

from linrec.lab.tasks.automata import Lengths, StateTracking, Steps, StringTask
from linrec.lab.tasks.base import NO_TARGET
from linrec.lab.tasks.synthetic import Alphabet, Drawn

__all__ = ["ModularArithmetic", "Reversing"]

# tokens of the operators and brackets, relative to `modulus`
PLUS, MINUS, TIMES, OPEN, CLOSE = range(5)


@dataclass(frozen=True, kw_only=True)
class ModularArithmetic(StateTracking):
    """Evaluate an expression modulo a small number.

        3 + 4 * 2 - 1   ->   0   (mod 5)                  without brackets: d o d o ... o d
        ((-2)*(3+(1)))  ->   2   (mod 5)                  with brackets: E = d | -d | (d) | (-d) | (E o E)

    Tokens are the digits d = 0 .. `modulus` - 1, then + - * and, if brackets are used, ( ), then the padding.

    Without brackets, expressions have an odd number of symbols, so an even length is reduced by 1; a finite
    automaton can evaluate them. With brackets, all lengths are possible, and evaluation needs a stack. The
    number of symbols left of an operator o is uniform, with at least a symbol on its right.

    With `dense`, the target at a digit is the value of the expression up to this digit; `dense` is not
    available with brackets.

    Args:
        modulus: modulus of the arithmetic, and number of digits.
        operators: operators that occur, with equal probability.
        brackets: whether expressions have brackets and negated digits.

    Source: Delétang and others (2023), "Modular Arithmetic (Simple)", where multiplication takes precedence,
    and "Modular Arithmetic", with numbers 0 to 4; the released code omits multiplication by default.

    Example:
        >>> task = ModularArithmetic(length=5, min_length=5, n_train=1, n_validation=1, n_test=1)
        >>> task.split("test").inputs.tolist(), task.split("test").targets.tolist()
        ([[4, 6, 1, 7, 1]], [[-100, -100, -100, -100, 3]])
    """

    modulus: int = 5
    operators: str = "+-*"
    brackets: bool = False
    least: ClassVar[Mapping[str, int]] = {"modulus": 2}

    @property
    def alphabet(self) -> Alphabet:
        """Digits, three operators, brackets if they are used, padding; the answers are remainders."""
        return Alphabet(self.modulus + (6 if self.brackets else 4), self.modulus, self.modulus)

    def check(self) -> None:
        """Require operators, and targets at the ends of expressions with brackets."""
        used = set(self.operators)
        if not used or len(used) < len(self.operators) or not used <= set("+-*"):
            raise ValueError(f"`operators` must be distinct characters of '+-*'; got {self.operators!r}.")
        if self.brackets and self.dense:
            raise ValueError(
                "`dense` must be False with `brackets`: a prefix of an expression has no value before its "
                "brackets are closed."
            )
        super().check()

    def existing(self, lengths: Lengths) -> Lengths:
        """Return the lengths, reduced to odd lengths if expressions have no brackets."""
        return lengths if self.brackets else lengths - (lengths + 1) % 2

    def n_strings(self, length: int) -> int:
        """Return the number of expressions of a length, after `existing` has reduced the length."""
        if not self.brackets:
            pairs = (length - 1) // 2
            return self.modulus ** (pairs + 1) * len(self.operators) ** pairs
        counts = [0] + [self.modulus] * 4
        for size in range(5, length + 1):
            splits = sum(counts[left] * counts[size - 3 - left] for left in range(1, size - 3))
            counts.append(len(self.operators) * splits)
        return counts[length]

    def strings(self, random: np.random.Generator, lengths: Lengths) -> tuple[Steps, Steps]:
        """Draw expressions; the answers are the values of expressions and, without brackets, of prefixes."""
        return self._bracketed(random, lengths) if self.brackets else self._simple(random, len(lengths))

    def _simple(self, random: np.random.Generator, n: int) -> tuple[Steps, Steps]:
        digits = random.integers(0, self.modulus, (n, (self.length + 1) // 2))
        between = self._draw_operators(random, (n, self.length // 2))
        symbols = np.empty((n, self.length), np.int64)
        symbols[:, ::2], symbols[:, 1::2] = digits, self.modulus + between
        answers = np.full((n, self.length), NO_TARGET)
        # the sum of all complete terms, and the last term, which another factor may follow
        total, term = np.zeros(n, np.int64), digits[:, 0]
        answers[:, 0] = term
        for i in range(1, digits.shape[1]):
            digit, operator = digits[:, i], between[:, i - 1]
            total = np.where(operator == TIMES, total, total + term)
            term = np.select([operator == PLUS, operator == MINUS], [digit, -digit], term * digit)
            term %= self.modulus
            answers[:, 2 * i] = (total + term) % self.modulus
        return symbols, answers

    def _bracketed(self, random: np.random.Generator, lengths: Lengths) -> tuple[Steps, Steps]:
        """Draw the trees of all expressions level by level, and evaluate them from the leaves."""
        n, modulus = len(lengths), self.modulus
        symbols = np.zeros((n, self.length), np.int64)
        row, start, size = np.arange(n), np.zeros(n, np.int64), lengths
        levels = []
        while len(row):
            end = start + size - 1
            around = size >= 3
            symbols[row[around], start[around]] = modulus + OPEN
            symbols[row[around], end[around]] = modulus + CLOSE

            inner = size >= 5
            leaf = ~inner
            digit = random.integers(0, modulus, leaf.sum())
            symbols[row[leaf], start[leaf] + size[leaf] // 2] = digit
            negative = leaf & (size % 2 == 0)
            symbols[row[negative], end[negative] - size[negative] // 2] = modulus + MINUS
            value = np.zeros(len(row), np.int64)
            value[leaf] = np.where(negative[leaf], -digit, digit) % modulus

            row, start, size = row[inner], start[inner], size[inner]
            operator = self._draw_operators(random, len(row))
            left = random.integers(1, size - 3)
            symbols[row, start + 1 + left] = modulus + operator
            levels.append((value, inner, operator))
            row = np.tile(row, 2)
            start, size = np.append(start + 1, start + 2 + left), np.append(left, size - 3 - left)

        below = np.empty(0, np.int64)
        for value, inner, operator in reversed(levels):
            a, b = np.split(below, 2)
            value[inner] = np.select([operator == PLUS, operator == MINUS], [a + b, a - b], a * b) % modulus
            below = value
        answers = np.full((n, self.length), NO_TARGET)
        answers[np.arange(n), lengths - 1] = below
        return symbols, answers

    def _draw_operators(
        self, random: np.random.Generator, shape: int | tuple[int, int]
    ) -> Int64[np.ndarray, "*shape"]:
        allowed = np.array(["+-*".index(operator) for operator in self.operators])
        return allowed[random.integers(0, len(allowed), shape)]


@dataclass(frozen=True, kw_only=True)
class Reversing(StringTask):
    """Repeat a string in reverse order.

        x = s_1 .. s_L, marker * L
        y = (no target) * L, s_L .. s_1

    A stack can reverse any string; a state of fixed size can reverse strings up to a maximum length. Tokens
    are the symbols 0 .. `n_symbols` - 1, the marker, and the padding after shorter strings.

    Scores are grouped by length.

    Args:
        n_symbols: number of distinct symbols.

    Source: Delétang and others (2023), "Reverse String": two symbols, lengths 1 to 40 in training and up to
    500 in testing.

    Example:
        >>> task = Reversing(length=3, min_length=3, n_symbols=9, n_train=1, n_validation=1, n_test=1)
        >>> task.split("test").inputs.tolist(), task.split("test").targets.tolist()
        ([[3, 2, 3, 9, 9, 9]], [[-100, -100, -100, 3, 2, 3]])
    """

    min_length: int = 1
    n_symbols: int = 2
    least: ClassVar[Mapping[str, int]] = {"length": 1, "n_symbols": 2}

    @property
    def alphabet(self) -> Alphabet:
        """Symbols, marker, padding; the answers are symbols."""
        return Alphabet(self.n_symbols + 2, self.n_symbols, self.n_symbols)

    def draw_from(self, random: np.random.Generator, n: int, shortest: int) -> Drawn:
        """Draw n samples of uniformly distributed lengths from `shortest` to `length`."""
        lengths = random.integers(shortest, self.length + 1, (n, 1))
        step = np.arange(2 * self.length)
        symbols = random.integers(0, self.n_symbols, (n, len(step)))
        marker = self.n_symbols
        inputs = np.where(step < lengths, symbols, np.where(step < 2 * lengths, marker, marker + 1))
        # answers mirror the string at the boundary between string and markers
        mirrored = np.take_along_axis(inputs, np.clip(2 * lengths - 1 - step, 0, None), axis=1)
        targets = np.where((step >= lengths) & (step < 2 * lengths), mirrored, NO_TARGET)
        return Drawn(inputs, targets, np.broadcast_to(lengths, inputs.shape).copy())
