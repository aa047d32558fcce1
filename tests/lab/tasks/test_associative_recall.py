import pytest

from linrec.lab.tasks.recall import AssociativeRecall
from tests.lab.tasks.recall import FEW, check_against, check_next_tokens


@pytest.mark.parametrize("absent", [False, True])
def test_the_last_key_has_the_value_that_it_had_before(absent):
    task = AssociativeRecall(length=12, n_keys=5, n_values=4, absent=absent, **FEW)
    missing = []

    def oracle(inputs):
        keys, values = inputs[0:12:2], inputs[1:12:2]
        assert all(key < 5 for key in keys) and all(5 <= value < 9 for value in values)
        told = {}
        for key, value in zip(keys, values, strict=True):
            assert told.setdefault(key, value) == value
        assert inputs[12] == 9
        missing.append(inputs[13] not in told)
        return {13: told.get(inputs[13], 10)}

    check_against(oracle, task.split("test"))
    assert any(missing) == absent and not all(missing)
    assert task.chance == (1 / 5 if absent else 1 / 4)


def test_each_key_that_was_shown_is_equally_likely_to_be_asked_for():
    task = AssociativeRecall(length=6, n_keys=2, n_values=50, n_train=8000, n_validation=1, n_test=1)
    keys, asked = task.split("train").inputs[:, 0:6:2], task.split("train").inputs[:, -1]
    # a key that came twice, of two, is not asked for more often
    both = (keys.sum(1) % 3) != 0
    often = keys.sum(1) >= 2
    assert (asked == often)[both].double().mean().item() == pytest.approx(
        0.5, abs=4 * 0.5 / int(both.sum()) ** 0.5
    )


def test_where_keys_may_be_absent_all_are_equally_likely_to_be_asked_for():
    task = AssociativeRecall(length=6, n_keys=8, absent=True, n_train=8000, n_validation=1, n_test=1)
    asked = task.split("train").inputs[:, -1].bincount(minlength=8)
    assert asked.sum() == 8000 and (asked - 1000).abs().max() < 4 * 1000**0.5


def test_the_training_split_may_ask_for_all_tokens():
    check_next_tokens(AssociativeRecall(predict_all=True, **FEW), AssociativeRecall(**FEW))


def test_long_sequences_are_drawn():
    task = AssociativeRecall(
        n_keys=14, n_values=14, n_train=1, n_validation=1, n_test=2, test_lengths=(131_072,)
    )
    probe = task.probes["131072"]
    for inputs, targets in zip(probe.inputs, probe.targets, strict=True):
        (places,) = (inputs[:-2:2] == inputs[-1]).nonzero(as_tuple=True)
        assert (inputs[2 * places + 1] == targets[-1]).all()


def test_fields_out_of_range_are_refused():
    with pytest.raises(ValueError, match="`length` must be even, two tokens per pair; got 7"):
        AssociativeRecall(length=7)
    with pytest.raises(ValueError, match="`n_values` must be at least 2; got 1"):
        AssociativeRecall(n_values=1)
