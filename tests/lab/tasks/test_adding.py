import pytest
import torch

from linrec.lab.tasks.dynamics import Adding

FEW = {"n_train": 20, "n_validation": 5}


@pytest.mark.parametrize("length", [2, 7, 10])
def test_the_two_marked_numbers_are_added(length):
    test = Adding(length=length, n_test=2000, **FEW).split("test")
    for steps, (target,) in zip(test.inputs.tolist(), test.targets.tolist(), strict=True):
        marked = [t for t, (_, mark) in enumerate(steps) if mark]
        assert all(mark in (0, 1) and 0 <= number < 1 for number, mark in steps)
        assert len(marked) == 2 and marked[0] < length // 2 <= marked[1]
        assert target == pytest.approx(sum(steps[t][0] for t in marked), abs=1e-6)
    # every step of a half is as likely as another
    marks = test.inputs[:, :, 1].sum(0)
    half = length // 2
    for places in (marks[:half], marks[half:]):
        n = len(places)
        assert (places - 2000 / n).abs().max() <= 4 * (2000 / n * (1 - 1 / n)) ** 0.5


def test_one_sixth_is_the_error_of_answering_one():
    test = Adding(length=4, n_test=20_000, **FEW).split("test")
    assert Adding().chance == 1 / 6
    # four standard deviations of the mean of squares, whose own variance is 7 / 180
    error = Adding(length=4).score(torch.ones_like(test.targets), test)["mse"]
    assert error == pytest.approx(1 / 6, abs=4 * (7 / 180 / 20_000) ** 0.5)


def test_a_sequence_of_one_step_is_refused():
    with pytest.raises(ValueError, match="`length` must be at least 2; got 1"):
        Adding(length=1)
