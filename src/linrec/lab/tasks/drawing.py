"""Random generators of splits, rejection of repeated samples, random choices, and packing of tokens."""

import zlib
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Bool, Float, Int64
from numpy.typing import NDArray

Choices = Int64[np.ndarray, "n k"]
Samples = TypeVar("Samples")

TRIES = 1000
"""Number of rounds in a row without a new sample after which an error is raised."""
BLOCK = 1000
"""Number of rows that are hashed at once, to bound the memory."""


def split_generator(task: str, split: str, seed: int, *more: int) -> np.random.Generator:
    """Return the random generator of a split, by the name of the task's class, the split's name and seeds."""
    return np.random.default_rng([seed, zlib.crc32(f"{task} {split}".encode()), *more])


def draw_distinct(
    draw: Callable[[int], Samples],
    n: int,
    *,
    rows: Callable[[Samples], NDArray[Any]],
    name: str,
    taken: Collection[int] = (),
    repeats: bool = False,
    largest_round: int | None = None,
    tries: float = TRIES,
) -> Iterator[tuple[Samples, Bool[np.ndarray, "n"]]]:
    """Yield rounds of samples, each with a mask of new samples, until n new samples are drawn.

    A sample is new if it is not in `taken` and, without `repeats`, did not occur before. Every round requests
    from `draw` exactly the number of missing samples, so the samples are a pure function of the random
    generator behind `draw`.

    Args:
        draw: function that draws at most the given number of samples.
        n: number of new samples.
        rows: function that returns the part of samples to compare, shape (samples, t), integers.
        name: the split and its task, for the error.
        taken: fingerprints of the samples of other splits.
        repeats: whether new samples may equal each other, so that only `taken` is excluded.
        largest_round: maximum number of samples per round; None is no limit.
        tries: number of rounds in a row without a new sample after which an error is raised.
    """
    seen = set(taken)
    missing, in_vain = n, 0
    while missing > 0:
        drawn = draw(missing if largest_round is None else min(missing, largest_round))
        numbers = fingerprints(rows(drawn)).tolist()
        new = np.zeros(len(numbers), np.bool_)
        for place, number in enumerate(numbers):
            new[place] = number not in seen
            if not repeats:
                seen.add(number)
        in_vain = 0 if new.any() else in_vain + 1
        if in_vain == tries:
            raise ValueError(
                f"{name} has too few different samples: only {n - missing} of {n} were found that are not in "
                "another split. Pass a smaller `n_train`, `n_validation` or `n_test`, or longer sequences."
            )
        yield drawn, new
        missing -= int(new.sum())


def fingerprints(rows: NDArray[Any]) -> NDArray[np.uint64]:
    """Return a 64-bit hash of each row.

    Args:
        rows: shape (n, t), integers.

    Returns:
        Shape (n), uint64. Two different rows collide with a probability of about 2^-64.
    """
    weights = np.random.default_rng(rows.shape[1]).integers(0, 2**63, rows.shape[1], dtype=np.uint64)
    # odd weights, so that every change of a single token changes the hash
    weights = 2 * weights + np.uint64(1)
    blocks = [rows[at : at + BLOCK].astype(np.uint64) @ weights for at in range(0, len(rows), BLOCK)]
    return np.concatenate([np.empty(0, np.uint64), *blocks])


def without_replacement(
    random: np.random.Generator, n: int, k: int, m: int, weights: Float[np.ndarray, "m"] | None = None
) -> Choices:
    """Return n samples of k of m items, drawn without replacement.

        P(c_j = i | c_1 .. c_{j-1}) = w_i / sum of the weights of the remaining items

    Args:
        random: the random generator.
        n: number of samples.
        k: number of items in a sample, at most m.
        m: number of items to choose from.
        weights: w, positive, shape (m), float; None for equal weights.

    Returns:
        Indices of items, 0 to m - 1, in the order in which they were drawn, shape (n, k), int64.
    """
    if weights is None and m > 4 * k:
        return _redrawn(random, n, k, m)
    # the order of independent exponential times with rates w has this distribution
    times = random.standard_exponential((n, m))
    if weights is not None:
        times /= weights
    first = np.argpartition(times, k - 1, axis=1)[:, :k]
    order = np.argsort(np.take_along_axis(times, first, axis=1), axis=1)
    return np.take_along_axis(first, order, axis=1)


def first_alike(codes: Int64[np.ndarray, "n p"]) -> Int64[np.ndarray, "n p"]:
    """Return, for every entry, the column of the first equal entry in its row.

    Args:
        codes: shape (n, p), int64.

    Returns:
        Columns, shape (n, p), int64: an entry's own column if no earlier entry is equal.
    """
    order = np.argsort(codes, axis=1, kind="stable")
    ordered = np.take_along_axis(codes, order, axis=1)
    columns = np.arange(codes.shape[1])
    begins = np.ones(codes.shape, np.bool_)
    begins[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    begin = np.maximum.accumulate(np.where(begins, columns, 0), axis=1)
    first = np.empty_like(order)
    np.put_along_axis(first, order, np.take_along_axis(order, begin, axis=1), axis=1)
    return first


def one_of(random: np.random.Generator, eligible: Bool[np.ndarray, "n p"]) -> Int64[np.ndarray, "n"]:
    """Return the column of a random eligible entry in each row, which has at least one, equally likely."""
    return np.where(eligible, random.random(eligible.shape), -1).argmax(1)


def noisy(random: np.random.Generator, n: int, width: int, noise: float) -> Bool[np.ndarray, "n width"]:
    """Return a mask of n rows, true with probability `noise`, but never at a random position of each row."""
    chosen = random.random((n, width)) < noise
    chosen[np.arange(n), random.integers(0, width, n)] = False
    return chosen


def require_noise(noise: float, n_noise: int) -> None:
    """Raise ValueError if `noise` is no probability below 1, or if there is noise but no token for it."""
    if not 0 <= noise < 1:
        raise ValueError(f"`noise` must be at least 0 and below 1; got {noise}.")
    if n_noise < (noise > 0):
        raise ValueError(
            f"`n_noise` must be at least {int(noise > 0)} with `noise` = {noise}; got {n_noise}."
        )


def places(kept: Bool[np.ndarray, "n w"]) -> tuple[Int64[np.ndarray, "kept"], Int64[np.ndarray, "kept"]]:
    """Return the positions of kept entries after each row is packed to the left.

    Args:
        kept: mask of the entries to keep, shape (n, w), bool.

    Returns:
        Row and new column of every kept entry, row by row, each of shape (kept), int64.
    """
    return np.nonzero(kept)[0], (np.cumsum(kept, axis=1) - 1)[kept]


def _redrawn(random: np.random.Generator, n: int, k: int, m: int) -> Choices:
    # draw repeated items again until all items of a sample are distinct; the procedure treats all items
    # equally, so all samples without repetition are equally likely
    choices = random.integers(0, m, (n, k))
    rows, now = np.arange(n), choices
    while len(rows):
        again = first_alike(now) != np.arange(k)
        some = again.any(1)
        rows, now, again = rows[some], now[some], again[some]
        now[again] = random.integers(0, m, int(again.sum()))
        choices[rows] = now
    return choices
