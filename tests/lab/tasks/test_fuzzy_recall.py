import itertools
from collections import Counter

import pytest

from linrec.lab.tasks import NO_TARGET
from linrec.lab.tasks.recall import FuzzyRecall
from tests.lab.tasks.recall import FEW, check_against, check_next_tokens


def pairs_of(inputs, n_keys, padding):
    """Split what comes after the padding into keys and values: (step of the first token, tokens) of each."""
    runs = []
    for kind, run in itertools.groupby(
        enumerate(inputs), lambda step: (step[1] >= n_keys) + (step[1] == padding)
    ):
        steps, tokens = zip(*run, strict=True)
        runs.append((kind, steps[0], tokens))
    if runs[0][0] == 2:
        del runs[0]
    if runs[-1][0] == 0:
        # of a value of one token, nothing is an input
        runs.append((1, len(inputs), ()))
    assert [kind for kind, _, _ in runs] == [0, 1] * (len(runs) // 2)
    return [(key[2], value[1], value[2]) for key, value in zip(runs[::2], runs[1::2], strict=True)]


def recall(inputs, n_keys, padding):
    told, answers = {}, {}
    *pairs, (last_key, last_step, last_value) = pairs_of(inputs, n_keys, padding)
    for key, step, value in pairs:
        assert len(set(key)) == len(key) <= 3 and len(set(value)) == len(value) <= 2
        if key in told:
            answers |= {step - 1 + place: token for place, token in enumerate(told[key])}
        assert told.setdefault(key, value) == value
    # the last pair asks for what is known
    wanted = told[last_key]
    assert wanted[:-1] == last_value
    return answers | {last_step - 1 + place: token for place, token in enumerate(wanted)}


def test_every_key_that_comes_again_has_the_value_it_had():
    task = FuzzyRecall(length=40, n_keys=4, n_values=5, value_size=2, **FEW)
    check_against(lambda inputs: recall(inputs, 4, 9), task.split("test"))
    assert task.split("test").inputs.shape == (60, 39)


def test_scores_tell_how_many_tokens_a_key_has():
    task = FuzzyRecall(length=40, **FEW)
    test = task.split("test")
    for inputs, targets, group in zip(
        test.inputs.tolist(), test.targets.tolist(), test.group.tolist(), strict=True
    ):
        for key, step, _ in pairs_of(inputs, 7, 15):
            assert targets[step - 1] == NO_TARGET or group[step - 1] == len(key)


def test_sizes_and_tokens_are_uniform():
    task = FuzzyRecall(length=60, n_train=1500, n_validation=1, n_test=1)
    firsts = [pairs_of(inputs, 7, 15)[0] for inputs in task.split("train").inputs.tolist()]
    for sizes in (Counter(len(key) for key, _, _ in firsts), Counter(len(value) for _, _, value in firsts)):
        assert set(sizes) == {1, 2, 3}
        assert max(abs(count - 500) for count in sizes.values()) < 4 * 500**0.5
    tokens = Counter(key[0] for key, _, _ in firsts)
    assert max(abs(count - 1500 / 7) for count in tokens.values()) < 4 * (1500 / 7) ** 0.5
    # the room that is left is less than the last pair and another might have taken
    assert int((task.split("train").inputs == 15).sum(1).max()) < 12


def test_each_pair_is_as_likely_to_be_that_which_comes_again():
    # of so many tokens no key is drawn twice, but for a few
    task = FuzzyRecall(length=40, n_keys=500, n_train=2000, n_validation=1, n_test=1)
    places = []
    for inputs in task.split("train").inputs.tolist():
        *pairs, (last, _, _) = pairs_of(inputs, 500, 508)
        places.append(([key for key, _, _ in pairs].index(last) + 0.5) / len(pairs))
    assert sum(places) / 2000 == pytest.approx(0.5, abs=4 / (12 * 2000) ** 0.5)
    assert {int(4 * place) for place in places} == {0, 1, 2, 3}


def test_the_training_split_may_ask_for_all_tokens_but_padding():
    check_next_tokens(FuzzyRecall(predict_all=True, **FEW), FuzzyRecall(**FEW), masked=(15,))


def test_a_task_without_room_is_refused():
    with pytest.raises(
        ValueError, match=r"`length` must be at least 2 \(`key_size` \+ `value_size`\) = 12, .*; got 11"
    ):
        FuzzyRecall(length=11)
    with pytest.raises(ValueError, match="`n_keys` must be at least 4; got 3"):
        FuzzyRecall(key_size=4, n_keys=3)
