"""What every drawn task of real numbers has to offer, found by discovery, and its scores."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from linrec.lab import tasks
from linrec.lab.tasks import (
    ProbedTask,
    RegressionTask,
    ScoredTask,
    Source,
    Split,
    SyntheticTask,
    Task,
    has_target,
    judged_by,
)
from linrec.lab.tasks.dynamics import Adding
from linrec.lab.train.config import TrainConfig, config_from_dict, config_to_dict
from linrec.lab.train.recipes import get_recipe

REGRESSIONS = [name for name in tasks.names() if issubclass(tasks.get(name), RegressionTask)]
SPLITS = ("train", "validation", "test")


def small(name, **fields):
    return tasks.get(name)(**{"length": 30, "n_train": 60, "n_validation": 20, "n_test": 20} | fields)


@pytest.fixture(params=REGRESSIONS)
def name(request):
    return request.param


def test_they_are_found():
    assert {"adding", "fitzhugh_nagumo", "irregular_sines", "mackey_glass"} <= set(REGRESSIONS)
    assert not any(issubclass(tasks.get(name), SyntheticTask) for name in REGRESSIONS)


def test_data_depend_on_the_fields_alone_and_leave_the_global_random_state(name):
    np.random.seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    one = [small(name).split(split) for split in SPLITS]
    # another order of reading, and more to train on
    other_task = small(name, n_train=90)
    other = [other_task.split(split) for split in reversed(SPLITS)][::-1]
    for mine, same in zip(one[1:], other[1:], strict=True):
        assert torch.equal(mine.inputs, same.inputs)
        torch.testing.assert_close(mine.targets, same.targets, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(small(name).split("train").inputs, one[0].inputs)
    assert not torch.equal(small(name, seed=1).split("test").inputs, one[2].inputs)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])


def test_no_two_samples_are_alike(name):
    task = small(name)
    rows = torch.cat([task.split(split).inputs.flatten(1) for split in SPLITS])
    assert len(torch.unique(rows, dim=0)) == 100


def test_shapes_and_types_are_what_models_and_losses_take(name):
    task = small(name)
    split = task.split("train")
    assert isinstance(task, ScoredTask) and isinstance(task, ProbedTask) and isinstance(split, Source)
    assert split.inputs.dtype == split.targets.dtype == torch.float32
    assert split.inputs.shape == (60, 30, task.n_features) and split.inputs.isfinite().all()
    steps = () if task.per_sequence else (30,)
    assert split.targets.shape == (60, *steps, task.n_outputs)
    assert has_target(split.targets).flatten(1).any(1).all()
    assert split.group is None and task.vocab_size is None
    assert judged_by(task) == "mse"


def test_fresh_epochs_have_samples_of_their_own(name):
    train = small(name, fresh=True).split("train")
    first, second = (train.of_epoch(seed=0, epoch=epoch) for epoch in (0, 1))
    assert first.inputs.shape == second.inputs.shape == train.inputs.shape
    assert not torch.equal(first.inputs, second.inputs) and not torch.equal(train.inputs, first.inputs)
    assert torch.equal(train.of_epoch(seed=0, epoch=1).inputs, second.inputs)
    assert not torch.equal(train.of_epoch(seed=1, epoch=1).inputs, second.inputs)
    same = small(name, fresh=False).split("train")
    assert same.of_epoch(seed=0, epoch=1) is same


def test_the_trivial_score_is_that_of_the_mean_and_chance_is_near(name):
    task = small(name, n_train=800, n_test=800, length=60)
    targets = task.split("test").targets
    mean = task.split("train").targets.flatten(0, -2).nanmean(0)
    scores = task.score(mean.expand_as(targets), task.split("test"))
    assert scores["mse"] == pytest.approx(task.trivial_score, rel=1e-5)
    # against the mean of the split itself
    assert scores["nrmse"] == pytest.approx(1, abs=0.05)
    assert task.trivial_score == pytest.approx(task.chance, rel=0.25)


def test_probes_are_test_splits_of_other_lengths(name):
    task = small(name, test_lengths=(30, 50))
    assert {length: split.inputs.shape[1] for length, split in task.probes.items()} == {"30": 30, "50": 50}
    assert torch.equal(task.probes["30"].inputs, task.split("test").inputs)


def test_a_task_is_a_configuration_that_a_file_holds(name):
    task: Task = small(name)
    config: TrainConfig = dataclasses.replace(get_recipe(name), task=task)
    assert config_from_dict(config_to_dict(config)) == config
    assert config.model.n_features == task.n_features and config.model.n_outputs == task.n_outputs
    assert config.model.pooling == ("last" if task.per_sequence else "none")
    assert not config.model.bidirectional


def test_scores_are_those_of_the_formula_and_leave_out_what_is_not_asked():
    targets = torch.tensor([[1.0, 10.0], [3.0, math.nan], [math.nan, 14.0]])
    split = Split(torch.zeros(3, 2, 2), targets)
    predictions = torch.tensor([[2.0, 10.0], [3.0, 7.0], [5.0, 11.0]])
    # errors 1, 0, 0 and 3; from the means 2 and 12 the targets are 1, 1, 2 and 2 away
    scores = Adding(length=2).score(predictions, split)
    assert scores == {"mse": pytest.approx(10 / 4), "nrmse": pytest.approx(1)}
    equal = Split(torch.zeros(2, 2, 2), torch.ones(2, 1))
    assert Adding(length=2).score(torch.zeros(2, 1), equal) == {"mse": 1.0, "nrmse": None}
    with pytest.raises(TypeError, match=r"must be real numbers; got torch\.int64"):
        Adding(length=2).score(torch.zeros(2, 1).long(), equal)
    with pytest.raises(ValueError, match=r"must have the shape of the targets, \(2, 1\); got \(2,\)"):
        Adding(length=2).score(torch.zeros(2), equal)
