import dataclasses
import json

import numpy as np
import pytest
import torch

from linrec.lab.report.arms import group_runs
from linrec.lab.report.write import means
from linrec.lab.tasks import ScoredTask, Task, judged_by
from linrec.lab.tasks.sepsis import COLUMNS, Sepsis, area_under_curve
from linrec.lab.train import TrainConfig, fit, get_recipe, load_run
from linrec.lab.train.config import config_from_dict, config_to_dict
from linrec.text import DataError

N = 40


def table(number):
    """The lines of a stay: most values are missing, and hour 3 has no line."""
    random = np.random.default_rng(number)
    hours = [hour for hour in range(1, 80 if number == 0 else 3 + number % 9) if hour != 3]
    lines = np.full((len(hours), len(COLUMNS)), np.nan)
    seen = random.random((len(hours), 34)) < 0.3
    lines[:, :34][seen] = random.normal(80, 10, int(seen.sum())).round(2)
    lines[:, 34:39] = [60 + number, number % 2, *((1, 0) if number % 3 else (np.nan, np.nan)), -5.5]
    lines[:, 39], lines[:, 40] = hours, np.array(hours) >= (5 if number % 2 else 99)
    return lines


def text_of(lines):
    return "\n".join(
        ["|".join(COLUMNS), *("|".join("NaN" if np.isnan(x) else f"{x:g}" for x in line) for line in lines)]
    )


@pytest.fixture
def folder(tmp_path):
    for number in range(N):
        path = tmp_path / f"training_set{'AB'[number % 2]}" / f"p{number:06}.psv"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text_of(table(number)) + "\n")
    return tmp_path


def steps(number):
    """Hours 1 to 72, with a line of missing values for hour 3."""
    lines = table(number)
    hours = lines[:, 39].astype(int)
    found = np.full((min(72, hours.max()), len(COLUMNS)), np.nan)
    for hour, line in zip(hours, lines, strict=True):
        if hour <= 72:
            found[hour - 1] = line
    return found


def test_steps_are_the_last_values_constants_hours_and_numbers_of_observations(folder):
    task = Sepsis(path=folder)
    stays = {60 + number: steps(number) for number in range(N) if len(steps(number)) > 2}
    seen, ages = {}, {}
    for name in ("train", "validation", "test"):
        split = task.split(name)
        ages[name] = [int(age) for age in split.values[:, 0, 34]]
        for row, age in enumerate(ages[name]):
            seen[age] = (split, row)
    assert seen.keys() == stays.keys() and sum(map(len, ages.values())) == len(stays)
    observed = np.concatenate([stays[age][:, 0] for age in ages["train"]])
    mean, std = np.nanmean(observed), np.nanstd(observed)
    for age, stay in stays.items():
        split, row = seen[age]
        batch = split.rows(torch.tensor([row]))
        n = len(stay)
        assert batch.lengths.tolist() == [n] and batch.inputs.shape == (1, 72, 76)
        assert batch.targets.tolist() == [int(np.nanmax(stay[:, 40]))]
        last = np.nan
        for hour in range(n):
            last = stay[hour, 0] if not np.isnan(stay[hour, 0]) else last
            expected = 0.0 if np.isnan(last) else (last - mean) / std
            assert float(batch.inputs[0, hour, 0]) == pytest.approx(expected, abs=1e-4)
        assert not batch.inputs[0, n:].any()
        values = split.values[row, :n]
        assert values[:, 39].tolist() == list(range(1, n + 1))
        assert values[:, 40:74].tolist() == (~np.isnan(stay[:, :34])).cumsum(0).tolist()
        assert values[:, 74].tolist() == [float((age - 60) % 3 > 0)] * n
        assert values[:, 36].tolist() == [float((age - 60) % 3 > 0)] * n
    assert not Sepsis(path=folder, intensity=False).split("test").rows(torch.tensor([0])).inputs.isnan().any()


def test_classes_have_the_same_share_of_each_split_by_the_seed(folder):
    task: Task = Sepsis(path=folder)
    labels = {name: task.split(name).labels for name in ("train", "validation", "test")}
    share = torch.cat([*labels.values()]).double().mean()
    assert all(abs(part.double().mean() - share) < 0.2 and len(part) >= 4 for part in labels.values())
    other = Sepsis(path=folder, seed=1).split("test")
    assert other.values[:, 0, 34].tolist() != task.split("test").values[:, 0, 34].tolist()


def test_the_area_under_the_curve_is_the_share_of_ordered_pairs(folder):
    random = np.random.default_rng(0)
    predictions, labels = random.integers(0, 5, 60) / 4, (random.random(60) < 0.3).astype(np.int64)
    pairs = [(a > b) + (a == b) / 2 for a in predictions[labels == 1] for b in predictions[labels == 0]]
    found = area_under_curve(torch.from_numpy(predictions), torch.from_numpy(labels))
    assert found == pytest.approx(np.mean(pairs))
    assert area_under_curve(torch.zeros(3), torch.ones(3).long()) is None
    task = Sepsis(path=folder)
    test = task.split("test")
    assert isinstance(task, ScoredTask) and judged_by(task) == "auc"
    right = torch.nn.functional.one_hot(test.labels, 2).double()
    # a constant that is added to both logarithms changes nothing
    right += torch.from_numpy(random.normal(size=(len(test), 1)))
    assert task.score(right, test)["auc"] == 1 and task.score(0 * right, test)["auc"] == 0.5
    assert task.score(right, test)["accuracy"] == 1 and Sepsis().trivial_score == 0.5
    with pytest.raises(TypeError, match=r"logarithms of probabilities \(n, 2\); got torch.int64"):
        task.score(test.labels, test)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda text: "",
            r"must have the header HR\|O2Sat\|Temp\|...\|SepsisLabel, .*got the header '', and 0",
        ),
        (lambda text: text.replace("HR|", "Rate|", 1), "got the header 'Rate"),
        (lambda text: text + "x|" * 40 + "x\n", "could not convert string to float"),
        (lambda text: text + text.splitlines()[-1] + "\n", "41 columns, and the hours"),
    ],
)
def test_damaged_files_are_refused_in_one_line(folder, change, message):
    path = folder / "training_setA" / "p000002.psv"
    path.write_text(change(path.read_text()))
    with pytest.raises(DataError, match=message) as caught:
        Sepsis(path=folder).prepared()
    assert "\n" not in str(caught.value)


def test_missing_files_and_fields_out_of_range_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"got None\. Download .*challenge-2019.* --data.path"):
        Sepsis().prepared()
    with pytest.raises(DataError, match=r"must have files p\*.psv in it or below it; it has none"):
        Sepsis(path=tmp_path).prepared()
    with pytest.raises(ValueError, match="`hours` must be at least 3; got 2"):
        Sepsis(hours=2)


def test_the_recipe_trains_and_survives_json(folder, tmp_path):
    recipe = get_recipe("sepsis")
    assert config_from_dict(json.loads(json.dumps(config_to_dict(recipe)))) == recipe
    model = dataclasses.replace(recipe.model, d_model=4, d_channel_mixing=4)
    loop = dataclasses.replace(recipe.loop, device="cpu", batch_size=10, steps=2)
    result = fit(
        TrainConfig("tiny", dataclasses.replace(recipe.task, path=folder), model, loop=loop), tmp_path / "run"
    )
    assert 0 <= result.test["auc"] <= 1
    # the losses of both classes, of which the second counts ten times, over the number of patients
    run = load_run(tmp_path / "run")
    model, test = run.classifier(), run.config.task.split("test")
    batch = test.rows(torch.arange(len(test)))
    with torch.no_grad():
        z = model(batch.inputs, lengths=batch.lengths)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(
        z[:, 1] - z[:, 0], batch.targets.float(), pos_weight=torch.tensor(10.0)
    )
    assert result.test["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert result.test["auc"] == pytest.approx(area_under_curve(z[:, 1] - z[:, 0], batch.targets))
    assert means(group_runs([run])[0])["test area under the curve"] == f"{result.test['auc']:.3f} (1 seed)"
