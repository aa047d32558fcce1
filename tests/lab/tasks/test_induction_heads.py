import pytest

from linrec.lab.tasks.recall import InductionHeads
from tests.lab.tasks.recall import FEW, check_against, check_next_tokens


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


def test_the_training_split_may_ask_for_all_tokens():
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


def test_a_task_without_room_is_refused():
    with pytest.raises(ValueError, match=r"`length` must be at least 1 \+ `n_copied` = 4; got 3"):
        InductionHeads(length=3, n_copied=3)
    with pytest.raises(ValueError, match="`length` must be at least 1"):
        InductionHeads(test_lengths=(1,))
    with pytest.raises(ValueError, match="`n_symbols` must be at least 2; got 1"):
        InductionHeads(n_symbols=1)
