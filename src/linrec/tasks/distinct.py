"""Drawing the samples of a split: its generator, and rounds until samples are distinct."""

import zlib
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Bool
from numpy.typing import NDArray

Samples = TypeVar("Samples")

TRIES = 1000
"""Rounds in a row without a new sample before a task has too few different samples."""
BLOCK = 1000
"""Rows that are turned into 64-bit numbers together, to bound the memory."""


def split_generator(task: str, split: str, seed: int, *more: int) -> np.random.Generator:
    """Return the generator of a split, which differs from those of all other splits, tasks and seeds.

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
    """Yield rounds of samples, each with a mask of its new ones, until n new samples were drawn.

    A sample is new if it is not `taken` and, without `repeats`, did not occur before. Every round asks `draw`
    for as many samples as are missing, so that the samples are a pure function of the generator behind
    `draw`.

    Args:
        draw: draws up to as many samples as it is asked for.
        n: number of new samples.
        rows: returns what tells samples apart, shape (samples, t), integers.
        name: the split and its task, for the error.
        taken: fingerprints of the samples of other splits.
        repeats: whether samples may equal each other, and differ from `taken` alone.
        largest_round: samples of a round at most; None is no limit.
        tries: rounds in a row without a new sample before an error.

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
                f"{name} has too few different samples: {n - missing} of {n} were found that no other split "
                "has. Ask for fewer with `n_train`, `n_validation` and `n_test`, or for longer sequences."
            )
        yield drawn, new
        missing -= int(new.sum())


def fingerprints(rows: NDArray[Any]) -> NDArray[np.uint64]:
    """Return a number for each row: equal for equal rows and, but for rare accidents, for no others.

    Args:
        rows: shape (n, t), integers.

    Returns:
        Shape (n), uint64. Two different rows agree with a probability of about 2^-64.
    """
    weights = np.random.default_rng(rows.shape[1]).integers(0, 2**63, rows.shape[1], dtype=np.uint64)
    # odd, so that no change of a single token is lost
    weights = 2 * weights + np.uint64(1)
    blocks = [rows[at : at + BLOCK].astype(np.uint64) @ weights for at in range(0, len(rows), BLOCK)]
    return np.concatenate([np.empty(0, np.uint64), *blocks])
