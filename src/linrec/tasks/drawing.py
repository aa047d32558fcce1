"""Random choices for many samples at once, and where to put what, as several generators need it."""

import numpy as np
from jaxtyping import Bool, Float, Int64

Choices = Int64[np.ndarray, "n k"]


def without_replacement(
    random: np.random.Generator, n: int, k: int, m: int, weights: Float[np.ndarray, "m"] | None = None
) -> Choices:
    """Choose k different ones of m things, one after another, n times.

        P(c_j = i | c_1 .. c_{j-1}) = w_i / sum of the weights that are left

    Args:
        random: the generator.
        n: how many choices.
        k: things in each, at most m.
        m: how many things there are.
        weights: w, positive, shape (m), float; None where all are equal.

    Returns:
        Numbers of things in the order in which they were chosen, from 0 to m - 1, shape (n, k), int64.

    Example:
        >>> choices = without_replacement(np.random.default_rng(0), 2, 3, 3)
        >>> np.sort(choices).tolist()
        [[0, 1, 2], [0, 1, 2]]
    """
    if weights is None and m > 4 * k:
        return _redrawn(random, n, k, m)
    # of exponential times with these rates, the first is i with a probability in proportion to w_i, and so on
    times = random.standard_exponential((n, m))
    if weights is not None:
        times /= weights
    first = np.argpartition(times, k - 1, axis=1)[:, :k]
    order = np.argsort(np.take_along_axis(times, first, axis=1), axis=1)
    return np.take_along_axis(first, order, axis=1)


def first_alike(codes: Int64[np.ndarray, "n p"]) -> Int64[np.ndarray, "n p"]:
    """Return, for every entry, where the first entry of its row stands that equals it.

    Args:
        codes: shape (n, p), int64.

    Returns:
        Columns, shape (n, p), int64: an entry's own where it is the first of its kind.

    Example:
        >>> first_alike(np.array([[7, 3, 7, 3, 7]])).tolist()
        [[0, 1, 0, 1, 0]]
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
    """Return the column of one eligible entry of each row, all equally likely.

    Args:
        random: the generator.
        eligible: shape (n, p), bool; at least one of each row.
    """
    return np.where(eligible, random.random(eligible.shape), -1).argmax(1)


def noisy(random: np.random.Generator, n: int, width: int, noise: float) -> Bool[np.ndarray, "n width"]:
    """Return which places are noise: each with the same probability, but one of every row, which is none.

    Args:
        random: the generator.
        n: rows.
        width: places of a row.
        noise: the probability.
    """
    chosen = random.random((n, width)) < noise
    chosen[np.arange(n), random.integers(0, width, n)] = False
    return chosen


def require_noise(noise: float, n_noise: int) -> None:
    """Refuse what cannot be a task's fields `noise`, a probability, and `n_noise`, a number of tokens.

    Raises:
        ValueError: one of them is out of range, or there is noise without tokens.
    """
    if not 0 <= noise < 1:
        raise ValueError(f"`noise` must be at least 0 and below 1; got {noise}.")
    if n_noise < (noise > 0):
        raise ValueError(
            f"`n_noise` must be at least {int(noise > 0)} with `noise` = {noise}; got {n_noise}."
        )


def places(kept: Bool[np.ndarray, "n w"]) -> tuple[Int64[np.ndarray, "kept"], Int64[np.ndarray, "kept"]]:
    """Return where the kept entries go when those of each row move together, to the left.

    Args:
        kept: which entries of a row stay, shape (n, w), bool.

    Returns:
        Row and new column of every kept entry, row by row, each of shape (kept), int64.

    Example:
        >>> packed = np.zeros((2, 2), np.int64)
        >>> entries = np.array([[1, 2, 3], [4, 5, 6]])
        >>> kept = entries % 2 == 1
        >>> packed[places(kept)] = entries[kept]
        >>> packed.tolist()
        [[1, 3], [5, 0]]
    """
    return np.nonzero(kept)[0], (np.cumsum(kept, axis=1) - 1)[kept]


def _redrawn(random: np.random.Generator, n: int, k: int, m: int) -> Choices:
    # repetitions are drawn again until none is left. No step tells one thing from another, so that all
    # choices without repetition are equally likely
    choices = random.integers(0, m, (n, k))
    rows, now = np.arange(n), choices
    while len(rows):
        again = first_alike(now) != np.arange(k)
        some = again.any(1)
        rows, now, again = rows[some], now[some], again[some]
        now[again] = random.integers(0, m, int(again.sum()))
        choices[rows] = now
    return choices
