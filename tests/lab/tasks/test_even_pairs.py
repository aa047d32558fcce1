import itertools

import pytest

from linrec.lab.tasks.automata import EvenPairs
from tests.lab.tasks.strings import FEW, check, shares


@pytest.mark.parametrize("dense", [False, True])
def test_the_target_is_the_number_of_changes(dense):
    task = EvenPairs(length=17, min_length=1, dense=dense, **FEW)
    check(task, lambda bits: sum(pair in ((0, 1), (1, 0)) for pair in itertools.pairwise(bits)) % 2)
    assert task.chance == 1 / 2


def test_even_and_odd_are_equally_frequent():
    task = EvenPairs(length=30, min_length=20, n_train=4000)
    assert shares(task) == pytest.approx([0.5, 0.5], abs=4 * (0.25 / 4000) ** 0.5)
    assert task.trivial_score == pytest.approx(0.5, abs=4 * (0.25 / 1000) ** 0.5)
