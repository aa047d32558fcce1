import csv
import dataclasses
import datetime
import json
import math

import numpy as np
import pytest
import torch

from linrec.lab.tasks import ScoredTask, Source, Task, judged_by
from linrec.lab.tasks.ett import Ett, Forecast
from linrec.lab.train import LoopConfig, TrainConfig, fit, get_recipe
from linrec.lab.train.config import config_from_dict, config_to_dict
from linrec.models import SequenceClassifierConfig
from linrec.text import DataError

NAMES = ["date", "HUFL", "HULL", "MUFL", "MULL", "LUFL", "LULL", "OT"]
# 20 months of 30 days, and some more that nobody uses
MONTH = 30 * 24
STARTS = {"train": 0, "validation": 12 * MONTH, "test": 16 * MONTH}
ENDS = {"train": 12 * MONTH, "validation": 16 * MONTH, "test": 20 * MONTH}


def table(n, minutes=60, seed=0):
    random = np.random.default_rng(seed)
    values = (random.standard_normal((n, 7)).cumsum(0) / 50 + np.arange(7)).round(3)
    values[:, 0] = np.arange(n)
    start = datetime.datetime(2016, 7, 1)
    dates = [str(start + datetime.timedelta(minutes=minutes * line)) for line in range(n)]
    return dates, values


def write(path, dates, values):
    with path.open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(NAMES)
        lines.writerows([date, *line] for date, line in zip(dates, values.tolist(), strict=True))
    return path


@pytest.fixture(scope="module")
def data():
    return table(20 * MONTH + 30)


@pytest.fixture(scope="module")
def path(data, tmp_path_factory):
    return write(tmp_path_factory.mktemp("ett") / "ETTh1.csv", *data)


@pytest.mark.parametrize("fields", [{}, {"target": "MULL"}, {"multivariate": True}])
def test_every_window_is_cut_and_normalised_as_the_definition_says(path, data, fields):
    task = Ett(path=path, shown=10, horizon=4, **fields)
    columns = range(7) if task.multivariate else [NAMES.index(task.target) - 1]
    values = data[1][:, columns]
    training = values[: 12 * MONTH]
    values = (values - training.mean(0)) / training.std(0)
    f = len(columns)
    for name in STARTS:
        split = task.split(name)
        # training has no month before it to be shown
        first = STARTS[name] if name == "train" else STARTS[name] - 10
        assert len(split) == ENDS[name] - first - 13
        for number in (0, 7, len(split) - 1):
            batch = split.rows(torch.tensor([number]))
            window = torch.from_numpy(values[first + number :][:14]).float()
            assert batch.inputs.shape == (1, 14, f + 1) and batch.reset is batch.lengths is None
            torch.testing.assert_close(batch.inputs[0, :10, :f], window[:10])
            assert not batch.inputs[0, 10:, :f].any()
            assert batch.inputs[0, :, f].tolist() == [0] * 10 + [1] * 4
            torch.testing.assert_close(batch.targets[0, 10:], window[10:])
            assert batch.targets[0, :10].isnan().all()


def test_no_split_is_asked_for_what_another_one_is(path, data):
    # a series that only rises: its numbers tell where they are
    task = Ett(path=path, shown=10, horizon=4, target="HUFL")
    training = data[1][: 12 * MONTH, 0]
    for name in STARTS:
        split = task.split(name)
        targets = split.rows(torch.arange(len(split))).targets[:, 10:].double().numpy()
        asked = np.unique((targets * training.std() + training.mean()).round()).tolist()
        assert asked == list(range(10 if name == "train" else STARTS[name], ENDS[name]))


def test_the_calendar_is_that_of_the_dates_also_where_the_series_is_hidden(path, data):
    task = Ett(path=path, shown=40, horizon=9, calendar=True)
    assert task.n_features == 7
    split = task.split("test")
    for number in (0, 500, len(split) - 1):
        inputs = split.rows(torch.tensor([number])).inputs[0]
        for step, date in enumerate(data[0][16 * MONTH - 40 + number :][:49]):
            time = datetime.datetime.fromisoformat(date)
            day_of_year = int(time.strftime("%j")) - 1
            parts = [time.minute / 59, time.hour / 23, time.weekday() / 6, (time.day - 1) / 30]
            expected = torch.tensor([*parts, day_of_year / 365]) - 0.5
            torch.testing.assert_close(inputs[step, 2:], expected)


def test_a_quarter_of_an_hour_makes_months_four_times_as_long(tmp_path):
    dates, values = table(80 * MONTH, minutes=15)
    path = write(tmp_path / "ETTm1.csv", dates, values)
    task = Ett(path=path, shown=8, horizon=2, calendar=True)
    assert len(task.split("train")) == 48 * MONTH - 9
    assert [len(task.split(name)) for name in ("validation", "test")] == [16 * MONTH - 1] * 2
    inputs = task.split("test").rows(torch.tensor([5])).inputs[0]
    training = values[: 48 * MONTH, 6]
    expected = (values[64 * MONTH - 3, 6] - training.mean()) / training.std()
    assert float(inputs[0, 0]) == pytest.approx(expected, rel=1e-5)
    assert float(inputs[1, 2]) == pytest.approx(30 / 59 - 0.5)


def test_scores_are_those_of_the_steps_that_are_hidden(path, data):
    task: Task = Ett(path=path, shown=10, horizon=4)
    test: Source = task.split("test")
    assert isinstance(task, ScoredTask) and judged_by(task) == "mse"
    series, training = data[1][:, 6], data[1][: 12 * MONTH, 6]
    series = (series - training.mean()) / training.std()
    # the first window of the test months begins ten steps before them
    windows = np.stack([series[16 * MONTH + i :][:4] for i in range(len(test))])
    predictions = torch.full((len(test), 14, 1), 0.25)
    # what is said of the steps that are shown does not count
    predictions[:, :10] = math.nan
    scores = task.score(predictions, test)
    assert scores["mse"] == pytest.approx(((windows - 0.25) ** 2).mean(), rel=1e-5)
    assert scores["mae"] == pytest.approx(np.abs(windows - 0.25).mean(), rel=1e-5)
    assert scores["nrmse"] == pytest.approx((scores["mse"] / windows.var()) ** 0.5, rel=1e-5)
    assert task.trivial_score == task.chance == pytest.approx((windows**2).mean(), rel=1e-5)
    assert json.loads(json.dumps(scores)) == scores
    with pytest.raises(ValueError, match=rf"\({len(test)}, 14, 1\); got \(3, 14, 1\)"):
        task.score(predictions[:3], test)


def test_a_split_is_the_same_in_every_epoch_and_moves_to_a_device(path):
    split = Ett(path=path, calendar=True).split("train")
    assert split.of_epoch(seed=1, epoch=2) is split
    assert split.to("meta").rows(torch.tensor([3])).inputs.device.type == "meta"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [], "must begin with the line date,HUFL,.*; it begins with nothing. Download ETTh1"),
        (lambda lines: ["<html>", *lines], "it begins with <html>. .*ETDataset.* --data.path"),
        (lambda lines: lines[:2], "at least two lines; it has 1 lines, and 0 other"),
        (
            lambda lines: [*lines[:9], "2016-07-01,1,2", *lines[9:]],
            "a date like 2016-.* and 7 numbers in each line; got 3 entries in line 10",
        ),
        (lambda lines: [*lines[:9], lines[9] + "x"], "could not convert .* in line 10. It is damaged"),
        (lambda lines: [*lines[:9], lines[9][:-5] + "nan"], "it has 9 lines, and 1 other numbers"),
        (
            lambda lines: [lines[0], "x" + lines[1], *lines[2:]],
            "must have a date like 2016-.*; got Invalid isoformat string: 'x2016-.*' in line 2",
        ),
        (
            lambda lines: [*lines[:4], lines[4].replace(",", "+02:00,", 1), *lines[5:]],
            r"got 2016-07-01 03:00:00\+02:00, which has a time zone, in line 5",
        ),
        (
            lambda lines: [*lines[:4], "," + lines[4].split(",", 1)[1], *lines[5:]],
            "got Invalid isoformat string: '' in line 5",
        ),
        (lambda lines: [lines[0], *lines[1::2]], "an hour or a quarter of an hour apart; the first two are"),
        (lambda lines: [*lines[:2], *lines[1:]], "an hour or a quarter of an hour apart"),
        (
            lambda lines: [*lines[:9], *lines[12:]],
            "all be 3600 seconds apart; got 2016-07-01T11:00:00 after 2016-07-01T07:00:00 in line 10",
        ),
        (lambda lines: [*lines[:9], lines[8], *lines[9:]], "T07:00:00 after 2016-07-01T07:00:00 in line 10"),
        (lambda lines: lines[:-31], "at least 14400 lines of numbers, 20 months; it has 14399.*truncated"),
        (
            lambda lines: [lines[0], *(line.rsplit(",", 1)[0] + ",2" for line in lines[1:])],
            "a series of .* is constant",
        ),
    ],
)
def test_files_that_cannot_be_used_are_refused_in_one_line(path, tmp_path, change, message):
    changed = tmp_path / "ETTh1.csv"
    changed.write_text("\n".join(change(path.read_text().splitlines())) + "\n")
    with pytest.raises(DataError, match=message) as caught:
        Ett(path=changed).prepared()
    assert "\n" not in str(caught.value)


def test_a_mark_of_the_encoding_is_no_part_of_a_file(path, tmp_path):
    marked = tmp_path / "ETTh1.csv"
    marked.write_text("\ufeff" + path.read_text(), encoding="utf-8")
    expected, found = (Ett(path=p).split("test").series for p in (path, marked))
    assert torch.equal(expected, found)


def test_missing_files_and_fields_out_of_range_are_refused(path, tmp_path):
    with pytest.raises(DataError, match=r"`path` must be .*; got None. .*zhouhaoyi/ETDataset.*--data.path"):
        Ett().prepared()
    with pytest.raises(DataError, match=r"gone.csv does not exist. Download ETTh1.csv"):
        Ett(path=tmp_path / "gone.csv").prepared()
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        Ett(path=tmp_path).prepared()
    with pytest.raises(
        ValueError, match=r"= 3000 \+ 5641 steps must fit into the split 'train'; it has 8640"
    ):
        Ett(path=path, shown=3000, horizon=5641).prepared()
    with pytest.raises(ValueError, match=r"= 3000 \+ 2881 .* the split 'validation'; it has 5880"):
        Ett(path=path, shown=3000, horizon=2881).prepared()
    for field in ("shown", "horizon"):
        with pytest.raises(ValueError, match=f"`{field}` must be at least 1; got 0"):
            Ett(**{field: 0})
    with pytest.raises(ValueError, match="no `target` 'TO'; did you mean 'OT'"):
        Ett(target="TO")


def test_the_recipe_trains_and_survives_json(path, tmp_path):
    recipe = get_recipe("ett")
    assert config_from_dict(json.loads(json.dumps(config_to_dict(recipe)))) == recipe
    assert recipe.task.shown + recipe.task.horizon == 480 and not recipe.model.bidirectional
    task = Ett(path=path, shown=6, horizon=2, multivariate=True)
    model = dataclasses.replace(recipe.model, d_model=4, mixer_args={"d_state": 4}, n_layers=1)
    assert isinstance(model, SequenceClassifierConfig)
    loop = LoopConfig(device="cpu", batch_size=200, steps=3)
    result = fit(TrainConfig("tiny", task, model, loop=loop), tmp_path / "run")
    assert result.test["mse"] == pytest.approx(result.test["loss"], rel=1e-5)
    assert 0 < result.test["mae"] < 2 * result.test["mse"] ** 0.5


def test_a_csv_file_of_any_series_is_split_by_shares(tmp_path):
    n = 203
    values = np.random.default_rng(1).standard_normal((n, 3))
    dates = [str(datetime.datetime(2012, 1, 1) + datetime.timedelta(minutes=10 * line)) for line in range(n)]
    # weather.csv of Autoformer lacks a few lines
    dates[50:] = [
        str(datetime.datetime.fromisoformat(date) + datetime.timedelta(hours=1)) for date in dates[50:]
    ]
    path = tmp_path / "ECL.csv"
    lines = [
        "date,MT_001,MT_002,MT_320",
        *(f"{d},{a},{b},{c}" for d, (a, b, c) in zip(dates, values.tolist(), strict=True)),
    ]
    path.write_text("\n".join(lines) + "\n")
    # Informer's int(0.7 n), and int(0.2 n) at the end
    starts, ends = (
        {"train": 0, "validation": 142, "test": 163},
        {"train": 142, "validation": 163, "test": 203},
    )
    for fields, columns in (({}, [2]), ({"target": "MT_002"}, [1]), ({"multivariate": True}, [0, 1, 2])):
        task = Forecast(path=path, shown=10, horizon=4, **fields).prepared()
        assert (task.n_series, task.n_outputs, task.n_features) == (3, len(columns), len(columns) + 1)
        expected = values[:, columns]
        expected = (expected - expected[:142].mean(0)) / expected[:142].std(0)
        for name, start in starts.items():
            first = start if name == "train" else start - 10
            split = task.split(name)
            assert len(split) == ends[name] - first - 13
            last = split.rows(torch.tensor([len(split) - 1])).targets[0, 10:]
            np.testing.assert_allclose(last, expected[ends[name] - 4 : ends[name]], rtol=1e-5, atol=1e-6)
    assert isinstance(task, Task) and isinstance(task, ScoredTask) and task.trivial_score > 0
    recipe = get_recipe("forecast")
    assert config_from_dict(json.loads(json.dumps(config_to_dict(recipe)))) == recipe
    with pytest.raises(ValueError, match="no `target` 'MT_003'; did you mean"):
        Forecast(path=path, target="MT_003").prepared()
    with pytest.raises(ValueError, match=r"`n_series` must be 3, as in .*; got 321"):
        Forecast(path=path, n_series=321).prepared()
    path.write_text("day,a\n2012-01-01,1\n")
    with pytest.raises(DataError, match=r"the line date,NAME,.*; it begins with day,a\. Download ECL"):
        Forecast(path=path).prepared()
