import dataclasses
import itertools
from collections import Counter

import pytest

from linrec.lab.tasks import NO_TARGET
from linrec.lab.tasks.lookup import MQAR
from tests.lab.tasks.recall import FEW, check_against

BASED = ((16, 2, 5), (32, 4, 1), (32, 8, 1))


def recall(inputs, pairs, n_tokens):
    context, rest = inputs[: 2 * pairs], inputs[2 * pairs :]
    told = dict(zip(context[::2], context[1::2], strict=True))
    assert len(told) == len(set(told.values())) == pairs
    assert all(1 <= key < n_tokens // 2 <= value < n_tokens for key, value in told.items())
    answers = {2 * pairs + place: told[token] for place, token in enumerate(rest) if token in told}
    # every key is asked for once, at an even distance
    assert sorted(answers.values()) == sorted(told.values())
    assert all(step % 2 == 0 for step in answers)
    return answers


@pytest.mark.parametrize("filler", ["zero", "random"])
@pytest.mark.parametrize("n_tokens", [20, 41, 4000])
def test_every_key_is_asked_for_once_and_has_its_value(filler, n_tokens):
    task = MQAR(length=40, n_pairs=8, n_tokens=n_tokens, filler=filler, **FEW)
    test = task.split("test")
    check_against(lambda inputs: recall(inputs, 8, n_tokens), test)
    other = test.inputs[:, 16:][test.targets[:, 16:] == NO_TARGET]
    assert (other == 0).all() == (filler == "zero")
    assert task.chance == 1 / len(range(n_tokens // 2, n_tokens))


def test_tokens_are_uniform_and_distances_follow_the_power_law_without_replacement():
    task = MQAR(length=10, n_pairs=2, n_tokens=30, power=0.2, n_train=20_000, n_validation=1, n_test=1)
    train = task.split("train")
    # keys 1 to 14 and values 15 to 29 are each as likely as another in the first pair and in the second
    for step, (first, n) in enumerate([(1, 14), (15, 15)] * 2):
        counts = train.inputs[:, step].bincount(minlength=30)[first : first + n]
        assert counts.sum() == 20_000 and (counts - 20_000 / n).abs().max() < 4 * (20_000 / n) ** 0.5
    found = Counter()
    for inputs in train.inputs.tolist():
        found[tuple(inputs.index(key, 4) // 2 - 2 for key in inputs[0:4:2])] += 1
    weights = [1, 2**-0.8, 3**-0.8]
    for first, second in itertools.permutations(range(3), 2):
        p = weights[first] / sum(weights) * weights[second] / (sum(weights) - weights[first])
        assert found[first, second] / 20_000 == pytest.approx(p, abs=4 * (p / 20_000) ** 0.5)


def test_mixed_kinds_come_in_proportion_and_are_padded():
    task = MQAR(length=32, mix=BASED, n_tokens=100, n_train=7000, n_validation=5, n_test=60)
    kinds = Counter()
    for name in ("train", "test"):
        split = task.split(name)
        for inputs, targets, group in zip(
            split.inputs.tolist(), split.targets.tolist(), split.group.tolist(), strict=True
        ):
            length = inputs.index(100) if 100 in inputs else 32
            (pairs,) = set(group)
            assert inputs[length:] == [100] * (32 - length)
            asked = {step: target for step, target in enumerate(targets) if target != NO_TARGET}
            assert asked == recall(inputs[:length], pairs, 100)
            kinds[length, pairs] += name == "train"
    expected = {(16, 2): 5000, (32, 4): 1000, (32, 8): 1000}
    assert all(abs(kinds[kind] - count) < 4 * count**0.5 for kind, count in expected.items())
    assert sum(kinds.values()) == 7000
    assert task.vocab_size == 101 and task.n_outputs == 100
    assert MQAR(length=32, n_tokens=100).vocab_size == 100


def test_scores_tell_numbers_of_pairs_apart():
    task = MQAR(length=32, mix=BASED, n_tokens=100, **FEW)
    test = task.split("test")
    # right where there are two pairs alone
    predictions = test.targets.where(test.group == 2, 0)
    scores = task.score(predictions, test)["accuracy_by_pairs"]
    assert [(entry["pairs"], entry["accuracy"]) for entry in scores] == [(2, 1.0), (4, 0.0), (8, 0.0)]


def test_probes_are_of_one_kind_each():
    task = MQAR(length=32, mix=BASED, n_tokens=100, test_lengths=(64,), test_kinds=((64, 16), (24, 6)), **FEW)
    assert list(task.probes) == ["64", "64x16", "24x6"]
    for (name, split), pairs in zip(task.probes.items(), (4, 16, 6), strict=True):
        assert split.inputs.shape == (60, int(name.split("x")[0]))
        check_against(lambda inputs, pairs=pairs: recall(inputs, pairs, 100), split)
    assert dataclasses.replace(task, test_kinds=()).probes.keys() == {"64"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"length": 15},
            "`length` must be even and at least 4 times the number of pairs, which is at least 1; got 15",
        ),
        ({"n_pairs": 17}, "got 64 steps with 17 pairs"),
        ({"test_kinds": ((64, 0),)}, "`n_pairs` must be at least 1; got 0"),
        ({"n_pairs": 0}, "`n_pairs` must be at least 1; got 0"),
        (
            {"n_tokens": 9},
            "`n_tokens` must be at least 2 . 4 \\+ 2 = 10, for 4 distinct keys; got 9",
        ),
        ({"mix": BASED}, "`length` must be the longest length in `mix`, 32; got 64"),
        ({"mix": ((64, 4, 0),)}, "`mix` must have weights of at least 1; got 0"),
        ({"filler": "noise"}, "`filler` must be 'zero' or 'random'; got 'noise'"),
    ],
)
def test_kinds_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        MQAR(**fields)
