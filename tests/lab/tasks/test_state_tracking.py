"""What all tasks of state tracking share: lengths, padding, probes, and short strings left to training."""

from collections import Counter

import pytest

from linrec.lab import tasks
from linrec.lab.tasks.automata import Parity, StateTracking, WordProblem
from linrec.lab.tasks.stacks import ModularArithmetic
from tests.lab.tasks.strings import FEW, strings

TRACKING = [name for name in tasks.names() if issubclass(tasks.get(name), StateTracking)]


@pytest.fixture(params=TRACKING)
def name(request):
    return request.param


def test_lengths_are_uniform_and_padding_comes_after(name):
    task = tasks.get(name)(length=19, min_length=4, dense=False, **{**FEW, "n_train": 4000})
    lengths = Counter(len(string) for string in strings(task, "train"))
    # without brackets an even length stands for the odd one below it
    places = Counter(
        length - (length + 1) % 2 if name == "modular_arithmetic" else length for length in range(4, 20)
    )
    assert set(lengths) == set(places)
    for length, n in places.items():
        share = n / 16
        # held-out strings are lost to training; of none of these lengths more than a few
        assert lengths[length] / 4000 == pytest.approx(
            share, abs=4 * (share * (1 - share) / 4000) ** 0.5 + 0.01
        )


def test_targets_are_at_the_last_symbol_or_at_every_one_and_the_group_is_what_was_read(name):
    for dense in (False, True):
        task = tasks.get(name)(length=15, min_length=9, dense=dense, **FEW)
        test = task.split("test")
        for string, targets, group in zip(
            strings(task), test.targets.tolist(), test.group.tolist(), strict=True
        ):
            asked = [t for t, target in enumerate(targets) if target != -100]
            every = 2 if name == "modular_arithmetic" else 1
            assert asked == (list(range(0, len(string), every)) if dense else [len(string) - 1])
            assert [group[t] for t in asked] == [t + 1 for t in asked]


def test_dense_strings_are_of_one_length_unless_another_is_asked_for():
    assert Parity().shortest == 1
    assert Parity(dense=True).shortest == WordProblem().shortest == 40
    assert Parity(dense=True, min_length=3).shortest == 3
    assert WordProblem(dense=False).shortest == 1


def test_all_strings_that_are_few_are_left_to_training_and_splits_share_none():
    task = Parity(length=12, n_train=5000, n_validation=60, n_test=60)
    # 2^8 = 256 is the first power that is at least 2 (60 + 60)
    assert task.shortest_held_out == 8
    rows = {
        name: {tuple(string) for string in strings(task, name)} for name in ("train", "validation", "test")
    }
    assert min(map(len, rows["test"])) == min(map(len, rows["validation"])) == 8
    assert not rows["test"] & rows["validation"]
    assert not rows["train"] & (rows["test"] | rows["validation"])
    # all strings of up to five bits are trained on, 2 + 4 + 8 + 16 + 32
    assert sum(len(row) <= 5 for row in rows["train"]) == 62


def test_half_of_the_strings_of_the_only_length_are_left_to_training():
    task = Parity(length=8, min_length=8, n_train=2000, n_validation=64, n_test=64)
    rows = {
        name: {tuple(string) for string in strings(task, name)} for name in ("train", "validation", "test")
    }
    assert [len(rows[name]) for name in ("test", "validation", "train")] == [64, 64, 128]
    assert len(rows["test"] | rows["validation"] | rows["train"]) == 256
    # so it is in every epoch
    epoch = task.split("train").of_epoch(seed=0, epoch=3)
    assert {tuple(row) for row in epoch.inputs.tolist()} == rows["train"]


def test_too_few_strings_are_refused_at_once():
    with pytest.raises(
        ValueError,
        match=r"Parity has too few different samples: there must be at least twice as many strings of "
        r"`length` = 8 as `n_validation` \+ `n_test` = 129; got 256 strings",
    ):
        Parity(length=8, n_validation=65, n_test=64)
    with pytest.raises(ValueError, match=r"WordProblem has too few different samples.* 36 strings"):
        WordProblem(group="S3", length=2)


def test_probes_have_strings_of_their_length_alone_that_training_cannot_have(name):
    task = tasks.get(name)(length=12, test_lengths=(21, 33), **FEW)
    assert list(task.probes) == ["21", "33"]
    for length, probe in task.probes.items():
        assert probe.inputs.shape == (100, int(length))
        assert probe.inputs.max() < task.n_symbols
        assert (probe.targets[:, -1] != -100).all()
    with pytest.raises(
        ValueError, match=r"`test_lengths` must be greater than `length` = 12.*got \(21, 12\)"
    ):
        tasks.get(name)(length=12, test_lengths=(21, 12), **FEW)


def test_lengths_out_of_range_are_refused():
    for least in (0, 41):
        with pytest.raises(ValueError, match=f"`min_length` must be in 1 .. `length` = 40; got {least}"):
            Parity(min_length=least)
    with pytest.raises(ValueError, match="`length` must be at least 1; got 0"):
        ModularArithmetic(length=0)
