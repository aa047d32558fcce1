from collections import Counter

import pytest

from linrec.lab.tasks.stacks import Reversing
from tests.lab.tasks.recall import FEW, check_against


@pytest.mark.parametrize("n_symbols", [2, 5])
def test_strings_are_said_backwards(n_symbols):
    task = Reversing(length=12, n_symbols=n_symbols, **FEW)

    def oracle(inputs):
        string = inputs[: inputs.index(n_symbols)]
        length = len(string)
        assert max(string) < n_symbols
        assert inputs[length:] == [n_symbols] * length + [n_symbols + 1] * (24 - 2 * length)
        return dict(enumerate(reversed(string), start=length))

    for name in ("train", "test"):
        check_against(oracle, task.split(name))


def test_lengths_are_uniform_and_scores_tell_them_apart():
    task = Reversing(length=10, min_length=3, n_train=8000, n_validation=1, n_test=1)
    inputs = task.split("train").inputs
    assert (((inputs == 2).sum(1).bincount(minlength=11)[3:] - 1000).abs() < 4 * 1000**0.5).all()
    group = task.split("train").group
    assert (group == (inputs == 2).sum(1, keepdim=True)).all()


def test_short_strings_are_left_to_training_and_probes_are_of_one_length():
    task = Reversing(length=9, n_train=4000, n_validation=30, n_test=40, test_lengths=(10, 30))
    # of seven bits there are 128 strings, and of six fewer than 2 (30 + 40)
    assert task.shortest_held_out == 8
    lengths = {name: set(task.split(name).group[:, 0].tolist()) for name in ("train", "validation", "test")}
    assert lengths == {"train": set(range(1, 10)), "validation": {8, 9}, "test": {8, 9}}
    for length in (10, 30):
        probe = task.probes[str(length)]
        assert probe.inputs.shape == (40, 2 * length) and (probe.inputs[:, length:] == 2).all()
    ones = Counter(
        map(tuple, task.split("train").inputs[task.split("train").group[:, 0] == 1][:, :1].tolist())
    )
    assert set(ones) == {(0,), (1,)}


def test_probes_have_strings_of_lengths_that_training_cannot_have():
    # of 4,096 strings of twelve bits training would have had some that a probe has
    with pytest.raises(
        ValueError, match=r"`test_lengths` must be greater than `length` = 14.*got \(20, 12\)"
    ):
        Reversing(length=14, n_validation=100, n_test=500, test_lengths=(20, 12))
    with pytest.raises(ValueError, match=r"`test_lengths` must be greater than `length` = 40.*got \(40,\)"):
        Reversing(test_lengths=(40,))


def test_fields_out_of_range_are_refused():
    with pytest.raises(ValueError, match=r"`min_length` must be in 1 \.\. `length` = 40; got 41"):
        Reversing(min_length=41)
    with pytest.raises(ValueError, match=r"strings of `length` = 5 as .* = 2000; got 32"):
        Reversing(length=5)
    with pytest.raises(ValueError, match="`length` must be at least 1; got 0"):
        Reversing(length=0)
    with pytest.raises(ValueError, match="`n_symbols` must be at least 2; got 1"):
        Reversing(n_symbols=1)
