"""What every task of labelled sequences that are drawn has to offer, found by discovery."""

import dataclasses

import numpy as np
import pytest
import torch

from linrec.lab import tasks
from linrec.lab.tasks import ScoredTask, Source, Task, judged_by
from linrec.lab.tasks.labelled import LabelledTask
from linrec.lab.train.config import TrainConfig, config_from_dict, config_to_dict
from linrec.lab.train.recipes import get_recipe
from tests.tiers import tiered

LABELLED = [name for name in tasks.names() if issubclass(tasks.get(name), LabelledTask)]
SPLITS = ("train", "validation", "test")
# one worker compiles what draws them, and not each
pytestmark = pytest.mark.xdist_group("labelled sequences")


# what draws the others takes long to compile
@pytest.fixture(params=tiered(["listops"], [name for name in LABELLED if name != "listops"]))
def small(request, tmp_path):
    def make(**fields):
        sizes = {"n_train": 60, "n_validation": 20, "n_test": 20, "cache": tmp_path}
        return tasks.get(request.param)(**sizes | fields)

    return make


def everything(task, split):
    data = task.split(split)
    return data.rows(torch.arange(len(data)))


def test_data_depend_on_the_fields_alone_and_leave_the_global_random_state(small, tmp_path):
    torch.manual_seed(1)
    np.random.seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    one = [everything(small(), split) for split in SPLITS]
    # another order of reading, more to train on, and nothing kept
    other_task = small(n_train=70, cache=tmp_path / "other")
    other = [everything(other_task, split) for split in reversed(SPLITS)][::-1]
    for place in (1, 2):
        assert torch.equal(one[place].inputs, other[place].inputs)
        assert torch.equal(one[place].targets, other[place].targets)
    assert [len(batch.targets) for batch in one] == [60, 20, 20]
    assert not torch.equal(everything(small(seed=1), "test").inputs, one[2].inputs)
    # what is read from a file is what was drawn
    again = everything(small(), "train")
    assert torch.equal(again.inputs, one[0].inputs) and torch.equal(again.targets, one[0].targets)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])


def test_another_version_of_a_generator_does_not_read_what_an_older_one_drew(small, tmp_path, monkeypatch):
    small().split("test")
    older = set(tmp_path.iterdir())
    small().split("test")
    assert set(tmp_path.iterdir()) == older
    monkeypatch.setattr(type(small()), "version", type(small()).version + 1)
    small().split("test")
    assert len(set(tmp_path.iterdir()) - older) == len(older) == 1


def test_all_samples_of_all_splits_differ(small):
    rows = [tuple(row) for split in SPLITS for row in small().labelled(split).tokens.tolist()]
    assert len(set(rows)) == len(rows) == 100


def test_scores(small):
    task = small()
    test = task.split("test")
    labels = everything(task, "test").targets
    assert isinstance(task, ScoredTask) and isinstance(test, Source) and judged_by(task) == "accuracy"
    one_wrong = labels.clone()
    one_wrong[0] = (one_wrong[0] + 1) % task.n_outputs
    score = task.score(one_wrong, test)
    assert score["accuracy"] == pytest.approx(0.95)
    counts = torch.bincount(labels, minlength=task.n_outputs).tolist()
    for number, (accuracy, count) in enumerate(zip(score["accuracy_by_class"], counts, strict=True)):
        wrong = number == int(labels[0])
        assert accuracy == (pytest.approx(1 - wrong / count) if count else None)
    majority = int(torch.bincount(everything(task, "train").targets).argmax())
    assert task.trivial_score == pytest.approx(float((labels == majority).double().mean()))
    with pytest.raises(TypeError, match=r"must be integer classes; got torch\.float32"):
        task.score(labels.float(), test)
    with pytest.raises(ValueError, match=r"must have the shape of the targets, \(20,\)"):
        task.score(labels[:1], test)


def test_a_task_is_a_configuration_that_a_file_holds(small, tmp_path):
    task: Task = small()
    recipe = "lra-" + type(task).__name__.lower()
    config: TrainConfig = dataclasses.replace(get_recipe(recipe), task=task)
    assert config_from_dict(config_to_dict(config)) == config
    assert config.model.vocab_size == task.vocab_size and config.model.n_features == task.n_features
    assert config.model.n_outputs == task.n_outputs


def test_fields_out_of_range_are_refused(small):
    for field in ("n_train", "n_validation", "n_test"):
        with pytest.raises(ValueError, match=f"`{field}` must be at least 1; got 0"):
            small(**{field: 0})
    with pytest.raises(ValueError, match="`seed` must be at least 0; got -1"):
        small(seed=-1)
    with pytest.raises(ValueError, match="no split 'tests'; did you mean 'test'"):
        small().split("tests")
