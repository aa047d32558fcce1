"""Numba kernels that generate random expressions for the task `listops`."""

import numba
import numpy as np
from numpy.typing import NDArray

# tokens after the digits 0 to 9
MIN, MAX, MED, SM, END = 10, 11, 12, 13, 14
LEAF_SHARE = 0.75
# maximum number of attempts per sample
TREES = 1000


@numba.njit(cache=True)
def value_of(operator: int, values: NDArray[np.int64]) -> int:
    """Return the value of an operator applied to its arguments."""
    if operator == MIN:
        return values.min()
    if operator == MAX:
        return values.max()
    if operator == SM:
        return values.sum() % 10
    ordered = np.sort(values)
    # for an even number of values, the mean of the middle two values, rounded down
    return (ordered[(len(values) - 1) // 2] + ordered[len(values) // 2]) // 2


@numba.njit(cache=True)
def tree(
    random: np.random.Generator, depth: int, n_arguments: int, tokens: NDArray[np.uint8]
) -> tuple[int, int]:
    """Write a random tree to `tokens`; return its length, or 0 if it does not fit, and its value.

    Args:
        random: the random generator.
        depth: depth at which all nodes are digits; the root has depth 1.
        n_arguments: maximum number of arguments of an operator.
        tokens: output, shape (t), uint8.
    """
    # a stack of open operators: operator, number of arguments, number and values of evaluated arguments
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
    """Draw at most n trees of `min_length` to t tokens; return the number of trees found.

    Args:
        random: the random generator.
        depth: see `tree`.
        n_arguments: see `tree`.
        min_length: minimum number of tokens in a tree.
        tokens: output, shape (n, t), uint8; padded with zeros.
        values: output, shape (n).
        lengths: output, shape (n).
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
