"""Random trees of list operations as tokens, compiled by Numba: what the task `listops` is drawn with."""

import numba
import numpy as np
from numpy.typing import NDArray

# what comes after the digits 0 to 9
MIN, MAX, MED, SM, END = 10, 11, 12, 13, 14
LEAF_SHARE = 0.75
# trees for each sample that is wanted, until those that were found are all there are
TREES = 1000


@numba.njit(cache=True)
def value_of(operator: int, values: NDArray[np.int64]) -> int:
    """Return what an operator makes of its arguments."""
    if operator == MIN:
        return values.min()
    if operator == MAX:
        return values.max()
    if operator == SM:
        return values.sum() % 10
    ordered = np.sort(values)
    # of an even number, the mean of the middle two without its fraction
    return (ordered[(len(values) - 1) // 2] + ordered[len(values) // 2]) // 2


@numba.njit(cache=True)
def tree(
    random: np.random.Generator, depth: int, n_arguments: int, tokens: NDArray[np.uint8]
) -> tuple[int, int]:
    """Write a tree; return its length, 0 where there is no room for it, and its value.

    Args:
        random: the generator.
        depth: a node at this depth is a digit; the root is at depth 1.
        n_arguments: the most that an operator has.
        tokens: to write, shape (t), uint8.
    """
    # of the operators that are open: which, how many arguments they get, those that are known
    operators, wanted = np.empty(depth, np.int64), np.empty(depth, np.int64)
    known, values = np.zeros(depth, np.int64), np.empty((depth, n_arguments), np.int64)
    n_open, length = 0, 0
    while True:
        if length == len(tokens):
            return 0, 0
        if n_open + 1 < depth and random.random() >= LEAF_SHARE:
            operators[n_open] = MIN + int(4 * random.random())
            wanted[n_open] = 2 + int((n_arguments - 1) * random.random())
            known[n_open] = 0
            tokens[length] = operators[n_open]
            n_open, length = n_open + 1, length + 1
            continue
        value = int(10 * random.random())
        tokens[length] = value
        length += 1
        while n_open > 0:
            inner = n_open - 1
            values[inner, known[inner]] = value
            known[inner] += 1
            if known[inner] < wanted[inner]:
                break
            if length == len(tokens):
                return 0, 0
            value = value_of(operators[inner], values[inner, : wanted[inner]])
            tokens[length] = END
            n_open, length = inner, length + 1
        if n_open == 0:
            return length, value


@numba.njit(cache=True)
def draw(
    random: np.random.Generator,
    depth: int,
    n_arguments: int,
    min_length: int,
    tokens: NDArray[np.uint8],
    values: NDArray[np.int64],
    lengths: NDArray[np.int64],
) -> int:
    """Draw trees of `min_length` to t tokens; return how many were found.

    Args:
        random: the generator.
        depth: see `tree`.
        n_arguments: see `tree`.
        min_length: tokens of the shortest tree.
        tokens: to write, shape (n, t), uint8; behind a tree there are zeros.
        values: to write, shape (n).
        lengths: to write, shape (n).
    """
    found = 0
    for _ in range(TREES * len(tokens)):
        length, value = tree(random, depth, n_arguments, tokens[found])
        if length >= min_length:
            tokens[found, length:] = 0
            values[found], lengths[found] = value, length
            found += 1
            if found == len(tokens):
                break
    return found
