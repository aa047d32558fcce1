"""Modular arithmetic: the value of an expression of small numbers, with or without brackets.

Source: Delétang and others (2023, arXiv:2207.02098), "Modular Arithmetic (Simple)" and "Modular Arithmetic",
with numbers 0 to 4. Simple expressions have no brackets, and multiplication goes first. Those with brackets
are drawn here from the grammar in the docstring; the released code leaves multiplication out unless it is
asked for.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from linrec.tasks.base import NO_TARGET, require_at_least
from linrec.tasks.state_tracking import Lengths, StateTracking, Steps

__all__ = ["ModularArithmetic"]

# of the operators and brackets, from `modulus` on
PLUS, MINUS, TIMES, OPEN, CLOSE = range(5)


@dataclass(frozen=True, kw_only=True)
class ModularArithmetic(StateTracking):
    """Evaluate an expression modulo a small number.

        3 + 4 * 2 - 1   ->   0   (mod 5)                  without brackets: d o d o ... o d
        ((-2)*(3+(1)))  ->   2   (mod 5)                  with: E = d | -d | (d) | (-d) | (E o E)

    Tokens are the digits d = 0 .. `modulus` - 1, then + - * ( ), where brackets are used, then the padding.
    Without brackets an expression has an odd number of symbols, and an even length stands for the odd one
    below it; to read it, a finite state is enough. With brackets any number is possible, and a stack is
    needed; how many symbols are left of an operator o is uniform, so that at least one is right of it. The
    other fields are those of all tasks of state tracking; with `dense` the target at a digit is the value
    of the expression that ends there, which there is without brackets alone.

    Args:
        modulus: modulo what is calculated, and number of digits.
        operators: those that occur, each as often as the others.
        brackets: whether there are brackets, and the minus of a single digit.

    Source: Delétang and others (2023), "Modular Arithmetic (Simple)" and "Modular Arithmetic".

    Example:
        >>> task = ModularArithmetic(length=5, min_length=5, n_train=1, n_validation=1, n_test=1)
        >>> task.split("test").inputs.tolist(), task.split("test").targets.tolist()
        ([[4, 6, 1, 7, 1]], [[-100, -100, -100, -100, 3]])
    """

    modulus: int = 5
    operators: str = "+-*"
    brackets: bool = False

    def __post_init__(self) -> None:
        require_at_least(self, modulus=2)
        used = set(self.operators)
        if not used or len(used) < len(self.operators) or not used <= set("+-*"):
            raise ValueError(f"`operators` must be some of '+-*', each once; got {self.operators!r}.")
        if self.brackets and self.dense:
            raise ValueError(
                "`dense` must be False with `brackets`: what an expression begins with has no value before "
                "its brackets are closed."
            )
        super().__post_init__()

    @property
    def n_symbols(self) -> int:
        """Number of different symbols: digits, three operators, and brackets where they are used."""
        return self.modulus + (5 if self.brackets else 3)

    @property
    def n_outputs(self) -> int:
        """Number of target classes: remainders."""
        return self.modulus

    def existing(self, lengths: Lengths) -> Lengths:
        """Return the lengths, made odd where there are no brackets."""
        return lengths if self.brackets else lengths - (lengths + 1) % 2

    def n_strings(self, length: int) -> int:
        """Count the expressions of a length, of the odd one below an even one where there are no brackets."""
        if not self.brackets:
            pairs = (length - 1) // 2
            return self.modulus ** (pairs + 1) * len(self.operators) ** pairs
        counts = [0] + [self.modulus] * 4
        for size in range(5, length + 1):
            splits = sum(counts[left] * counts[size - 3 - left] for left in range(1, size - 3))
            counts.append(len(self.operators) * splits)
        return counts[length]

    def strings(self, random: np.random.Generator, lengths: Lengths) -> tuple[Steps, Steps]:
        """Draw expressions; the answers are their values, and those of what they begin with."""
        return self._bracketed(random, lengths) if self.brackets else self._simple(random, len(lengths))

    def _simple(self, random: np.random.Generator, n: int) -> tuple[Steps, Steps]:
        digits = random.integers(0, self.modulus, (n, (self.length + 1) // 2))
        between = self._draw_operators(random, (n, self.length // 2))
        symbols = np.empty((n, self.length), np.int64)
        symbols[:, ::2], symbols[:, 1::2] = digits, self.modulus + between
        answers = np.full((n, self.length), NO_TARGET)
        # the sum of the terms that are complete, and the last term, which a factor may still follow
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
        """Draw all expressions at once, level by level of their trees, and evaluate them from the leaves."""
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
