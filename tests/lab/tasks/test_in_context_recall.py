import pytest

from linrec.lab.tasks import NO_TARGET
from linrec.lab.tasks.recall import InContextRecall, NoisyRecall
from tests.lab.tasks.recall import FEW, check_against, check_next_tokens


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


def test_fields_out_of_range_are_refused():
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
