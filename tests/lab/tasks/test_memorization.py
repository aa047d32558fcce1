import pytest

from linrec.lab.tasks import NO_TARGET
from linrec.lab.tasks.copying import Memorization
from tests.lab.tasks.recall import check_against

FEW = {"n_train": 300, "n_validation": 5, "n_test": 60}


def facts_of(split):
    """Learn by heart what the samples say."""
    facts = {}
    for inputs, targets in zip(split.inputs.tolist(), split.targets.tolist(), strict=True):
        for step, target in enumerate(targets):
            if target != NO_TARGET:
                assert facts.setdefault(inputs[step - 1], target) == target
    return facts


@pytest.mark.parametrize("noise", [0.0, 0.6])
def test_what_the_training_samples_say_answers_the_test(noise):
    task = Memorization(length=12, n_facts=20, n_noise=3, noise=noise, test_lengths=(40,), **FEW)
    facts = facts_of(task.split("train"))
    assert sorted(facts) == sorted(facts.values()) == list(range(20))

    def oracle(inputs):
        answers = {}
        for step in range(0, len(inputs), 2):
            key, blank = inputs[step : step + 2]
            assert (key < 20 and blank == 20) or (key > 20 and blank > 20)
            if key < 20:
                answers[step + 1] = facts[key]
        return answers

    check_against(oracle, task.split("test"))
    check_against(oracle, task.probes["40"])
    noisy = (task.split("train").inputs[:, ::2] > 20).double().mean().item()
    assert noisy == pytest.approx(noise * 5 / 6, abs=4 * (0.25 / 1800) ** 0.5)


def test_the_facts_are_those_of_the_seed_and_keys_are_uniform():
    one, same, other = (
        Memorization(n_facts=10, fresh=fresh, seed=seed, n_train=2000)
        for seed, fresh in ((0, False), (0, True), (1, False))
    )
    assert facts_of(one.split("train")) == facts_of(same.split("train")) != facts_of(other.split("train"))
    assert facts_of(same.split("train").of_epoch(seed=3, epoch=4)) == facts_of(one.split("test"))
    keys = one.split("train").inputs[:, ::2].flatten().bincount(minlength=10)
    assert (keys - 3200).abs().max() < 4 * 3200**0.5


def test_fields_out_of_range_are_refused():
    with pytest.raises(ValueError, match="`length` must be even, a blank after every key; got 31"):
        Memorization(length=31)
    with pytest.raises(ValueError, match=r"`n_noise` must be at least 1 with `noise` = 0\.2; got 0"):
        Memorization(noise=0.2)
    with pytest.raises(ValueError, match="`n_facts` must be at least 2; got 1"):
        Memorization(n_facts=1)
