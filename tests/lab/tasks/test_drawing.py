import itertools
from collections import Counter

import numpy as np
import pytest

from linrec.lab.tasks.drawing import first_alike, one_of, places, without_replacement


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
