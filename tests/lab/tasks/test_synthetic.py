"""What every task that is drawn has to offer, found by discovery."""

import dataclasses

import numpy as np
import pytest
import torch

from linrec.lab import tasks
from linrec.lab.tasks import NO_TARGET, ProbedTask, ScoredTask, Source, SyntheticTask, Task
from linrec.lab.train.config import TrainConfig, config_from_dict, config_to_dict
from linrec.lab.train.recipes import get_recipe

SYNTHETIC = [name for name in tasks.names() if issubclass(tasks.get(name), SyntheticTask)]
SPLITS = ("train", "validation", "test")


def small(name, **fields):
    return tasks.get(name)(**{"n_train": 300, "n_validation": 60, "n_test": 60} | fields)


@pytest.fixture(params=SYNTHETIC)
def name(request):
    return request.param


def global_state():
    _, keys, place, *_ = np.random.get_state()
    return torch.get_rng_state().tolist(), keys.tolist(), place


def test_data_depend_on_the_fields_alone_and_leave_the_global_random_state(name):
    found = []
    # another state, another order of reading, and more to train on
    for seed, order, n_train in ((1, SPLITS, 300), (2, SPLITS[::-1], 400)):
        torch.manual_seed(seed)
        np.random.seed(seed)
        before = global_state()
        task = small(name, n_train=n_train)
        found.append({split: task.split(split).inputs for split in order})
        task.split("train").of_epoch(seed=0, epoch=0)
        assert global_state() == before
    one, other = found
    assert torch.equal(one["test"], other["test"]) and torch.equal(one["validation"], other["validation"])
    assert torch.equal(small(name).split("train").inputs, one["train"])
    assert not torch.equal(small(name, seed=1).split("test").inputs, one["test"])


def test_tasks_that_draw_alike_have_other_samples():
    bits = [small(name).split("train").inputs for name in ("parity", "even_pairs")]
    assert bits[0].shape == bits[1].shape and not torch.equal(*bits)


def test_splits_share_no_sample_and_held_out_samples_differ(name):
    task = small(name)
    rows = {split: [tuple(row) for row in task.split(split).inputs.tolist()] for split in SPLITS}
    assert len(set(rows["test"])) == len(set(rows["validation"])) == 60
    assert not set(rows["train"]) & set(rows["test"])
    assert not set(rows["train"]) & set(rows["validation"])
    assert not set(rows["validation"]) & set(rows["test"])


def test_tokens_and_targets_are_in_range_and_every_sample_has_a_target(name):
    task = small(name)
    for split in SPLITS:
        data = task.split(split)
        assert data.inputs.dtype == data.targets.dtype == torch.int64
        assert data.inputs.shape == data.targets.shape
        assert data.inputs.min() >= 0 and data.inputs.max() < task.vocab_size
        asked = data.targets != NO_TARGET
        assert asked.any(1).all()
        assert data.targets[asked].min() >= 0 and data.targets[asked].max() < task.n_outputs
        assert (data.group is None) == (not task.group_name)


def test_chance_and_the_trivial_score_are_what_guesses_reach(name):
    # so few values that all of them occur
    fields = {"n_tokens": 64} if name == "mqar" else {}
    task = small(name, n_train=2000, n_test=500, **fields)
    test = task.split("test")
    asked = test.targets != NO_TARGET
    classes = torch.unique(test.targets[asked])
    guesses = classes[
        torch.randint(len(classes), test.targets.shape, generator=torch.Generator().manual_seed(0))
    ]
    n = int(asked.sum())
    # four standard deviations of n guesses, and what classes that do not occur in the sample change
    off = 4 * (task.chance * (1 - task.chance) / n) ** 0.5 + 0.1 * task.chance
    assert task.score(guesses, test)["accuracy"] == pytest.approx(task.chance, abs=off)
    targets = task.split("train").targets
    targets = targets[targets != NO_TARGET]
    # all answers that are to be guessed from occur, and about as often as each other
    counts = targets.bincount()
    counts = counts[counts > 0]
    assert len(counts) == round(1 / task.chance)
    # sets of next symbols are not
    assert counts.min() > 0.7 * len(targets) / len(counts) or name in ("counter_language", "dyck")
    majority = torch.mode(targets).values
    trivial = task.score(torch.full_like(test.targets, int(majority)), test)["accuracy"]
    assert task.trivial_score == pytest.approx(trivial, abs=4 / n**0.5)


def test_scores_of_right_and_wrong_predictions(name):
    task = small(name)
    test = task.split("test")
    assert isinstance(task, ScoredTask) and isinstance(task, ProbedTask) and isinstance(test, Source)
    right = task.score(test.targets, test)
    assert right["accuracy"] == right["exact"] == 1.0
    one_wrong = test.targets.clone()
    place = int((test.targets[0] != NO_TARGET).nonzero()[0])
    one_wrong[0, place] = (one_wrong[0, place] + 1) % task.n_outputs
    asked = int((test.targets != NO_TARGET).sum())
    score = task.score(one_wrong, test)
    assert score["accuracy"] == pytest.approx(1 - 1 / asked)
    assert score["exact"] == pytest.approx(1 - 1 / 60)
    if task.group_name:
        by_group = score[f"accuracy_by_{task.group_name}"]
        assert sum(entry["count"] for entry in by_group) == asked
        assert sum(entry["accuracy"] * entry["count"] for entry in by_group) == pytest.approx(asked - 1)
    with pytest.raises(TypeError, match=r"must be integer classes; got torch\.float32"):
        task.score(test.targets.float(), test)
    with pytest.raises(ValueError, match=r"must have the shape of the targets, \(60, "):
        task.score(test.targets[:1], test)


def test_fresh_epochs_have_samples_of_their_own_that_no_split_has(name):
    task = small(name, fresh=True)
    train = task.split("train")
    first, second = (train.of_epoch(seed=0, epoch=epoch) for epoch in (0, 1))
    assert len(first) == len(second) == 300
    assert not torch.equal(first.inputs, second.inputs)
    assert torch.equal(train.of_epoch(seed=0, epoch=1).inputs, second.inputs)
    assert not torch.equal(train.of_epoch(seed=1, epoch=1).inputs, second.inputs)
    held_out = {tuple(row) for split in SPLITS[1:] for row in task.split(split).inputs.tolist()}
    assert not held_out & {tuple(row) for row in second.inputs.tolist()}
    always = small(name, fresh=False).split("train")
    assert always.of_epoch(seed=0, epoch=1) is always


def test_a_task_is_a_configuration_that_a_file_holds(name):
    task: Task = small(name)
    config: TrainConfig = dataclasses.replace(get_recipe(name), task=task)
    assert config_from_dict(config_to_dict(config)) == config
    assert config.model.vocab_size == task.vocab_size and config.model.n_outputs == task.n_outputs


def test_probes_are_test_splits_of_other_lengths():
    task = small("selective-copying", length=20, test_lengths=(20, 50))
    assert list(task.probes) == ["20", "50"]
    assert task.probes["50"].inputs.shape == (60, 66)
    # of its own length it is the test split itself
    assert torch.equal(task.probes["20"].inputs, task.split("test").inputs)
    with pytest.raises(ValueError, match="`length` must be at least `n_copied` = 16; got 5"):
        small("selective-copying", test_lengths=(5,))


def test_a_probe_is_drawn_without_the_other_splits():
    # a training split of this size fits into no memory
    task = small("copying", n_train=10**13, n_validation=10**13, test_lengths=(30,))
    assert task.probes["30"].inputs.shape == (60, 50)


def test_too_few_different_samples_and_fields_out_of_range_are_refused():
    with pytest.raises(ValueError, match=r"Copying has too few different samples: only 4 of 60 were found"):
        small("copying", n_copied=2, n_symbols=2).split("test")
    for field in ("n_train", "n_validation", "n_test"):
        with pytest.raises(ValueError, match=f"`{field}` must be at least 1; got 0"):
            small("copying", **{field: 0})
    with pytest.raises(ValueError, match="`seed` must be at least 0; got -1"):
        small("copying", seed=-1)
    with pytest.raises(ValueError, match="no split 'tests'; did you mean 'test'"):
        small("copying").split("tests")
