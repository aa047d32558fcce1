import dataclasses

import numpy as np
import pytest
import torch

from linrec.lab.tasks import ScoredTask, Source, Task
from linrec.lab.tasks.har2 import Har2
from linrec.lab.train import LoopConfig, TrainConfig, fit, get_recipe
from linrec.lab.train.config import config_from_dict, config_to_dict
from linrec.text import DataError

# the data's own order, and what Kusupati and others make of it
ACTIVITIES = ["WALKING", "WALKING_UPSTAIRS", "WALKING_DOWNSTAIRS", "SITTING", "STANDING", "LAYING"]
FIRST = {"SITTING", "LAYING", "WALKING_UPSTAIRS"}
SIGNALS = [
    *("body_acc_x", "body_acc_y", "body_acc_z", "body_gyro_x", "body_gyro_y", "body_gyro_z"),
    *("total_acc_x", "total_acc_y", "total_acc_z"),
]
SIZES = {"train": (30, 5), "test": (12, 2)}


def drawn(part):
    """Series, activities from 1 to 6, and persons, in order as in the data."""
    n, n_persons = SIZES[part]
    random = np.random.default_rng(n)
    series = random.normal(np.arange(9), 1 + np.arange(9), (n, 128, 9)).round(4)
    persons = np.sort(random.permutation(np.arange(n) % n_persons)) * 2 + (part == "test") + 1
    return series, random.permutation(np.arange(n) % 6) + 1, persons


def table(path, numbers):
    # two or three spaces come between numbers, and before the first
    lines = ["".join(f"{number: 17.7e}" for number in line) for line in numbers]
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "UCI HAR Dataset"
    for part in SIZES:
        signals = path / part / "Inertial Signals"
        signals.mkdir(parents=True)
        series, activities, persons = drawn(part)
        for place, name in enumerate(SIGNALS):
            table(signals / f"{name}_{part}.txt", series[:, :, place])
        for name, numbers in (("y", activities), ("subject", persons)):
            (path / part / f"{name}_{part}.txt").write_text("".join(f"{number}\n" for number in numbers))
    return path


def everything(split):
    return split.rows(torch.arange(len(split)))


def classes(activities):
    return [int(ACTIVITIES[number - 1] not in FIRST) for number in activities]


def test_splits_are_by_person_and_classes_group_the_activities(folder):
    task = Har2(path=folder, n_validation_persons=2)
    series, activities, persons = drawn("train")
    held_out = {}
    for name in ("train", "validation"):
        split = task.split(name)
        raw = split.values.numpy()
        places = [int(np.abs(series - one).max((1, 2)).argmin()) for one in raw]
        np.testing.assert_allclose(raw, series[places], rtol=1e-6)
        assert split.labels.tolist() == classes(activities[places])
        held_out[name] = set(persons[places])
    assert len(held_out["validation"]) == 2 and not held_out["validation"] & held_out["train"]
    assert held_out["validation"] | held_out["train"] == set(persons)
    series, activities, _ = drawn("test")
    np.testing.assert_allclose(task.split("test").values.numpy(), series, rtol=1e-6)
    assert task.split("test").labels.tolist() == classes(activities)
    seeds = [Har2(path=folder, n_validation_persons=2, seed=seed).split("train").labels for seed in range(4)]
    assert torch.equal(seeds[0], task.split("train").labels)
    assert len({tuple(labels.tolist()) for labels in seeds}) > 1


def test_signals_are_normalised_by_the_training_split(folder):
    task = Har2(path=folder)
    known = task.split("train").values.double().flatten(0, 1)
    batch = everything(task.split("test"))
    expected = (torch.from_numpy(drawn("test")[0]) - known.mean(0)) / known.std(0, correction=0)
    torch.testing.assert_close(batch.inputs.double(), expected, rtol=1e-4, atol=1e-5)
    assert batch.lengths is None and batch.inputs.shape == (12, 128, 9)


def test_it_is_a_task_with_chance_and_a_trivial_score(folder):
    task: Task = Har2(path=folder).prepared()
    source: Source = task.split("test")
    assert isinstance(task, ScoredTask) and task.chance == 0.5
    majority = int(torch.bincount(task.split("train").labels).argmax())
    share = np.mean([label == majority for label in classes(drawn("test")[1])])
    assert task.trivial_score == pytest.approx(share)
    assert task.score(source.labels, source)["accuracy"] == 1


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "train/y_train.txt",
            None,
            r"y_train.txt does not exist\. Download the data of",
        ),
        (
            "test/Inertial Signals/total_acc_z_test.txt",
            None,
            "pass the folder UCI HAR Dataset with",
        ),
        ("train/y_train.txt", "7\n" * 30, "must have activities from 1 to 6"),
        ("train/subject_train.txt", "1\n" * 29, r"equally many lines; got \[29, 30\]"),
        ("train/subject_train.txt", "1\n" * 30, "must be less than the 1 persons"),
        ("train/y_train.txt", "1 2\n" * 30, "must have 1 finite numbers in each line; it has 2"),
        ("train/y_train.txt", "one\n" * 30, "is damaged: could not convert string"),
        ("train/Inertial Signals/body_acc_x_train.txt", "1 2\n" * 30, "must have 128 finite .*; it has 2"),
    ],
)
def test_files_that_cannot_be_used_are_refused_in_one_line(folder, name, text, message):
    path = folder / name
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    with pytest.raises(DataError, match=message) as caught:
        Har2(path=folder).prepared()
    assert "\n" not in str(caught.value)


def test_a_missing_folder_and_fields_out_of_range_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"got None\. Download the data of https://archive\.ics\.uci\.edu"):
        Har2().prepared()
    with pytest.raises(ValueError, match="`n_validation_persons` must be at least 1; got 0"):
        Har2(n_validation_persons=0)


def test_the_recipe_trains(folder, tmp_path):
    recipe = get_recipe("har2")
    assert config_from_dict(config_to_dict(recipe)) == recipe
    assert recipe.model.pooling == "last" and not recipe.model.bidirectional
    model = dataclasses.replace(recipe.model, d_model=4, mixer_args={})
    loop = LoopConfig(device="cpu", batch_size=10, steps=2)
    result = fit(TrainConfig("tiny", Har2(path=folder), model, loop=loop), tmp_path / "run")
    assert 0 <= result.test["accuracy"] <= 1
