import itertools
from collections import Counter

import pytest

from linrec.lab.tasks import NO_TARGET
from linrec.lab.tasks.recall import (
    AssociativeRecall,
    FuzzyRecall,
    InContextRecall,
    InductionHeads,
    NoisyRecall,
)
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


def recall(inputs, n_keys, n_outputs):
    """Read pair by pair, and say what is known of a key."""
    told, answers = {}, {}
    for step in range(0, len(inputs), 2):
        key = inputs[step]
        if key >= n_outputs:
            assert inputs[step + 1] >= n_outputs
            continue
        assert key < n_keys
        if key in told:
            answers[step] = told[key]
        if step + 1 < len(inputs):
            assert n_keys <= inputs[step + 1] < n_outputs
            assert told.setdefault(key, inputs[step + 1]) == inputs[step + 1]
    assert len(inputs) - 1 in answers
    return answers


def test_every_key_that_comes_again_has_the_value_it_had():
    task = InContextRecall(length=20, n_keys=5, n_values=4, **FEW)
    assert task.split("test").inputs.shape == (60, 19)
    check_against(lambda inputs: recall(inputs, 5, 9), task.split("test"))


@pytest.mark.parametrize("noise", [0.0, 0.4, 0.9])
def test_noise_between_the_pairs_changes_nothing(noise):
    task = NoisyRecall(length=20, n_keys=5, n_values=4, n_noise=3, noise=noise, **FEW)
    check_against(lambda inputs: recall(inputs, 5, 9), task.split("test"))
    assert task.vocab_size == 12 and task.n_outputs == 9


def test_keys_and_values_are_uniform_everywhere():
    train = InContextRecall(length=12, n_train=8000, n_validation=1, n_test=1).split("train")
    for step, tokens in enumerate(train.inputs.T):
        counts = tokens.bincount(minlength=16)[8:] if step % 2 else tokens.bincount(minlength=8)
        assert counts.sum() == 8000 and (counts - 1000).abs().max() < 4 * 1000**0.5


def test_the_share_of_noise_is_that_of_the_pairs():
    task = NoisyRecall(length=22, noise=0.4, n_train=3000, n_validation=1, n_test=1)
    noise = (task.split("train").inputs[:, ::2] >= 16).double()
    # of ten pairs one is never noise, and the last neither
    assert noise[:, :-1].mean().item() == pytest.approx(0.4 * 9 / 10, abs=4 * (0.24 / 30_000) ** 0.5)
    assert (noise[:, :-1].mean(0) - 0.36).abs().max() < 4 * (0.24 / 3000) ** 0.5
    assert noise[:, -1].sum() == 0


def test_the_training_split_may_ask_for_all_tokens_but_noise():
    check_next_tokens(InContextRecall(predict_all=True, **FEW), InContextRecall(**FEW))
    task = NoisyRecall(predict_all=True, noise=0.5, **FEW)
    check_next_tokens(task, NoisyRecall(noise=0.5, **FEW), masked=range(16, 32))
    assert (task.split("train").targets == NO_TARGET).any()


def test_fields_of_in_context_recall_out_of_range_are_refused():
    with pytest.raises(ValueError, match="`length` must be even, two tokens per pair; got 21"):
        InContextRecall(length=21)
    with pytest.raises(ValueError, match=r"`noise` must be at least 0 and below 1; got 1\.0"):
        NoisyRecall(noise=1.0)
    with pytest.raises(ValueError, match=r"`n_noise` must be at least 1 with `noise` = 0\.2; got 0"):
        NoisyRecall(n_noise=0)


def test_each_key_that_was_shown_is_equally_likely_to_come_last():
    task = InContextRecall(length=8, n_keys=2, n_values=40, n_train=8000, n_validation=1, n_test=1)
    keys = task.split("train").inputs[:, ::2]
    both = (keys[:, :3].sum(1) % 3) != 0
    often = keys[:, :3].sum(1) >= 2
    share = (keys[:, 3] == often)[both].double().mean().item()
    assert share == pytest.approx(0.5, abs=4 * 0.5 / int(both.sum()) ** 0.5)


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


def fuzzy_recall(inputs, n_keys, padding):
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


def test_every_fuzzy_key_that_comes_again_has_the_value_it_had():
    task = FuzzyRecall(length=40, n_keys=4, n_values=5, value_size=2, **FEW)
    check_against(lambda inputs: fuzzy_recall(inputs, 4, 9), task.split("test"))
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


@pytest.mark.parametrize("copied", [1, 3])
def test_what_followed_the_trigger_is_said_when_it_comes_again(copied):
    task = InductionHeads(length=12, n_symbols=6, n_copied=copied, **FEW)

    def oracle(inputs):
        first, second = (step for step, token in enumerate(inputs) if token == 6)
        assert second == 12 == len(inputs) - copied
        answer = inputs[first + 1 : first + 1 + copied]
        assert inputs[second + 1 :] == answer[:-1]
        return {second + step: token for step, token in enumerate(answer)}

    check_against(oracle, task.split("test"))


def test_symbols_and_places_are_uniform():
    task = InductionHeads(length=9, n_symbols=4, n_train=8000, n_validation=1, n_test=1)
    inputs = task.split("train").inputs
    # eight places, since a symbol follows
    assert (inputs[:, 8] < 4).all()
    assert ((inputs[:, :8] == 4).sum(0) - 1000).abs().max() < 4 * 1000**0.5
    assert task.split("train").targets[:, -1].bincount(minlength=4).sub(2000).abs().max() < 4 * 2000**0.5
    assert task.chance == 0.25 and task.trivial_score in (0.0, 1.0)


def test_the_training_split_of_induction_heads_may_ask_for_all_tokens():
    check_next_tokens(
        InductionHeads(length=30, n_symbols=18, predict_all=True, **FEW),
        InductionHeads(length=30, n_symbols=18, **FEW),
    )


def test_a_million_steps_are_drawn():
    task = InductionHeads(n_train=10_000_000, n_validation=1, n_test=2, test_lengths=(1_048_576,))
    probe = task.probes["1048576"]
    for inputs, target in zip(probe.inputs, probe.targets[:, -1], strict=True):
        first, second = (inputs == 16).nonzero()[:, 0].tolist()
        assert second == 1_048_576 and inputs[first + 1] == target


def test_induction_heads_without_room_are_refused():
    with pytest.raises(ValueError, match=r"`length` must be at least 1 \+ `n_copied` = 4; got 3"):
        InductionHeads(length=3, n_copied=3)
    with pytest.raises(ValueError, match="`length` must be at least 1"):
        InductionHeads(test_lengths=(1,))
    with pytest.raises(ValueError, match="`n_symbols` must be at least 2; got 1"):
        InductionHeads(n_symbols=1)
