import pytest

from linrec.lab.tasks.automata import Parity
from tests.lab.tasks.strings import FEW, check, shares


@pytest.mark.parametrize("modulus", [2, 3])
@pytest.mark.parametrize("dense", [False, True])
def test_the_target_is_the_number_of_ones(modulus, dense):
    task = Parity(length=17, min_length=1, modulus=modulus, dense=dense, **FEW)
    check(task, lambda bits: bits.count(1) % modulus)
    assert task.chance == 1 / modulus


def test_bits_are_fair_and_remainders_equally_frequent():
    task = Parity(length=30, min_length=20, modulus=3, n_train=4000)
    assert shares(task) == pytest.approx([1 / 3] * 3, abs=4 * (2 / 9 / 4000) ** 0.5)
    inputs = task.split("train").inputs[:, :20]
    assert float((inputs == 1).double().mean()) == pytest.approx(0.5, abs=4 * (0.25 / 80_000) ** 0.5)
    # whoever answers what is most frequent is right by chance
    assert task.trivial_score == pytest.approx(1 / 3, abs=4 * (2 / 9 / 1000) ** 0.5)


def test_a_count_modulo_one_is_refused():
    with pytest.raises(ValueError, match="`modulus` must be at least 2; got 1"):
        Parity(modulus=1)
