"""Drawing of the samples of a split: the random generator, and rejection of repeated samples."""

import zlib
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Bool
from numpy.typing import NDArray

Samples = TypeVar("Samples")

TRIES = 1000
"""Number of rounds in a row without a new sample after which an error is raised."""
BLOCK = 1000
"""Number of rows that are hashed at once, to bound the memory."""


def split_generator(task: str, split: str, seed: int, *more: int) -> np.random.Generator:
    """Return the random generator of a split, which is different for every split, task and seed.

    Args:
        task: name of the task's class.
        split: name of the split.
        seed: seed of the data.
        more: further numbers, such as the epoch.
    """
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

    Raises:
        ValueError: `tries` rounds in a row had no new sample.

    Example:
        >>> random = np.random.default_rng(0)
        >>> rounds = draw_distinct(lambda n: random.integers(0, 4, (n, 1)), 4, rows=np.asarray, name="dice")
        >>> np.concatenate([drawn[new] for drawn, new in rounds]).ravel().tolist()
        [3, 2, 1, 0]
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
