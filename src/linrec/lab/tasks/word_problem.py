"""The word problem of a finite group: compute the product of a string of its elements.

Source: Merrill, Petty and Sabharwal (2024, arXiv:2404.08819), with a target at every step. The word problem
of S5, and of every group that is not solvable, is complete for NC1 (Barrington 1989). State-space models with
diagonal transitions and attention are in TC0. S3, S4, A4 and Zn are solvable.
"""

import itertools
import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Int64

from linrec.lab.tasks.state_tracking import Lengths, StateTracking, Steps

__all__ = ["WordProblem"]

# the largest number for each kind of group; S6 has 720 elements
MOST = {"S": 6, "A": 6, "Z": 1000}


@dataclass(frozen=True, kw_only=True)
class WordProblem(StateTracking):
    """Multiply a string of group elements.

        y_t = x_t x_{t-1} ... x_1

    Thus y_t = x_t y_{t-1}. A permutation p is the function i -> p(i), and the right factor of a product is
    applied first. Tokens are the indices of the elements, followed by the padding. Elements are permutations
    in lexicographic order (only even permutations for A), or rotations by the index for Z, so that 0 is the
    identity. See `StateTracking` for the other fields; `dense` is True by default.

    Args:
        group: name of the group, such as "S5": S is symmetric, A alternating (both of at most 6 letters), Z
            cyclic.

    Source: Merrill, Petty and Sabharwal (2024).

    Example:
        >>> task = WordProblem(group="Z3", length=6, n_train=1, n_validation=1, n_test=1)
        >>> task.split("test").inputs.tolist(), task.split("test").targets.tolist()
        ([[1, 0, 2, 0, 2, 1]], [[1, 1, 0, 0, 2, 0]])
        >>> WordProblem(group="S3").elements.tolist()
        [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]]
    """

    dense: bool = True
    group: str = "S5"

    def __post_init__(self) -> None:
        name = re.fullmatch(r"([SAZ])(\d{1,4})", self.group)
        if name is None or not (3 if name[1] == "A" else 2) <= int(name[2]) <= MOST[name[1]]:
            raise ValueError(
                f"`group` must be one of S2 .. S{MOST['S']}, A3 .. A{MOST['A']} and Z2 .. Z{MOST['Z']}; "
                f"got {self.group!r}."
            )
        super().__post_init__()

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

    @property
    def n_symbols(self) -> int:
        """Number of distinct symbols: all elements."""
        return len(self.elements)

    @property
    def n_outputs(self) -> int:
        """Number of target classes: all elements."""
        return len(self.elements)

    def n_strings(self, length: int) -> int:
        """Return the number of strings of a length."""
        return self.n_symbols**length

    def strings(self, random: np.random.Generator, lengths: Lengths) -> tuple[Steps, Steps]:
        """Draw elements; the answer at a step is the product so far."""
        elements = random.integers(0, self.n_symbols, (len(lengths), self.length))
        answers = elements.copy()
        for t in range(1, self.length):
            answers[:, t] = self.products[elements[:, t], answers[:, t - 1]]
        return elements, answers
