"""Drawing until samples are distinct, against rows that are compared as they are."""

import numpy as np
import pytest

from linrec.lab.tasks.drawing import draw_distinct, fingerprints


def collected(n, **options):
    """Return n new rows of two digits in 0 .. 3 and the sizes of all rounds."""
    random, sizes = np.random.default_rng(0), []

    def draw(size):
        sizes.append(size)
        return random.integers(0, 4, (size, 2))

    rounds = draw_distinct(draw, n, rows=lambda drawn: drawn, name="pairs", **options)
    return np.concatenate([drawn[new] for drawn, new in rounds]).tolist(), sizes


def test_samples_differ_and_every_round_draws_what_is_missing():
    samples, sizes = collected(16)
    assert sorted(samples) == [[i, j] for i in range(4) for j in range(4)]
    drawn = np.random.default_rng(0).integers(0, 4, (16, 2)).tolist()
    first = [row for place, row in enumerate(drawn) if row not in drawn[:place]]
    assert samples[: len(first)] == first and sizes[:2] == [16, 16 - len(first)]


def test_rounds_have_a_largest_size():
    samples, sizes = collected(12, largest_round=5)
    assert len(samples) == 12 and max(sizes) == 5


@pytest.mark.parametrize("repeats", [False, True])
def test_no_sample_is_taken(repeats):
    rows = np.array([[i, j] for i in range(4) for j in range(4)])
    samples, _ = collected(6, taken=fingerprints(rows[:10]).tolist(), repeats=repeats)
    assert not any(sample in rows[:10].tolist() for sample in samples)
    assert (len(np.unique(samples, axis=0)) < 6) == repeats


def test_too_few_different_samples_are_refused():
    with pytest.raises(ValueError, match="pairs has too few different samples: only 16 of 17 were found"):
        collected(17)
    # the last sample of many takes more rounds
    assert len(collected(16, tries=np.inf)[0]) == 16


def test_fingerprints_tell_rows_apart():
    rows = np.random.default_rng(0).integers(0, 4, (3000, 8))
    _, place = np.unique(rows, axis=0, return_inverse=True)
    _, mine = np.unique(fingerprints(rows), return_inverse=True)
    # the same rows fall together, in whatever order
    assert (
        len(set(zip(place.ravel().tolist(), mine.tolist(), strict=True))) == place.max() + 1 == mine.max() + 1
    )
    assert np.array_equal(fingerprints(rows.astype(np.uint8)), fingerprints(rows))
