import itertools
from collections import Counter

import numpy as np
import pytest

from linrec.lab.tasks.drawing import (
    draw_distinct,
    fingerprints,
    first_alike,
    one_of,
    places,
    without_replacement,
)


def test_choices_without_replacement_are_all_equally_likely():
    # few things and many take different ways
    for m, k in ((4, 2), (12, 2)):
        counts = Counter(map(tuple, without_replacement(np.random.default_rng(0), 26_400, k, m).tolist()))
        assert set(counts) == set(itertools.permutations(range(m), k))
        expected = 26_400 / len(counts)
        assert max(abs(count - expected) for count in counts.values()) < 4.5 * expected**0.5


def test_weights_decide_what_is_chosen_first_and_then_among_the_rest():
    weights = np.array([1.0, 2.0, 5.0])
    counts = Counter(
        map(tuple, without_replacement(np.random.default_rng(0), 20_000, 2, 3, weights).tolist())
    )
    for first, second in itertools.permutations(range(3), 2):
        p = weights[first] / 8 * weights[second] / (8 - weights[first])
        assert counts[first, second] / 20_000 == pytest.approx(p, abs=4 * (p / 20_000) ** 0.5)


def test_first_alike_finds_the_first_equal_entry():
    codes = np.random.default_rng(0).integers(0, 5, (50, 12))
    expected = [[row.index(code) for code in row] for row in codes.tolist()]
    assert first_alike(codes).tolist() == expected


def test_one_of_chooses_uniformly_among_what_is_eligible():
    eligible = np.tile([False, True, True, False, True], (6000, 1))
    counts = np.bincount(one_of(np.random.default_rng(0), eligible), minlength=5)
    assert counts[[0, 3]].tolist() == [0, 0]
    assert abs(counts[[1, 2, 4]] - 2000).max() < 4 * 2000**0.5


def test_places_keep_the_order_of_what_stays():
    kept = np.random.default_rng(0).random((20, 9)) < 0.5
    entries = np.arange(180).reshape(20, 9)
    packed = np.full((20, 9), -1)
    packed[places(kept)] = entries[kept]
    for row, chosen, result in zip(entries.tolist(), kept.tolist(), packed.tolist(), strict=True):
        stays = [entry for entry, keep in zip(row, chosen, strict=True) if keep]
        assert result == stays + [-1] * (9 - len(stays))


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
