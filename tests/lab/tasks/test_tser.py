import dataclasses

import numpy as np
import pytest
import torch

from linrec.lab.tasks import ScoredTask, Source, Task, judged_by
from linrec.lab.tasks.archives import Tser
from linrec.lab.train import LoopConfig, TrainConfig, fit, get_recipe, load_run
from linrec.lab.train.config import config_from_dict, config_to_dict
from linrec.text import DataError

N_TRAIN, N_TEST, STEPS = 40, 20, 6
# as in the archive, whose tags are in small letters
HEADER = """#Two signals
@problemname BIDMC32HR
@timestamps false
@missing false
@univariate false
@dimension 2
@equallength true
@serieslength 6
@targetlabel true
@data
"""


def draw(seed, n):
    random = np.random.default_rng(seed)
    rates = random.uniform(50, 120, n).round(2)
    # the rate tells on the second signal
    series = np.stack([random.normal(size=(n, STEPS)), rates[:, None] + np.arange(STEPS)], -1).round(3)
    return series, rates


def write(path, series, rates, header=HEADER):
    lines = [
        ":".join([*(",".join(map(str, column)) for column in one.T), str(rate)])
        for one, rate in zip(series, rates, strict=True)
    ]
    path.write_text(header + "\n".join(lines) + "\n")


TRAIN, TEST = draw(1, N_TRAIN), draw(2, N_TEST)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "BIDMC32HR"
    path.mkdir()
    write(path / "BIDMC32HR_TRAIN.ts", *TRAIN)
    write(path / "BIDMC32HR_TEST.ts", *TEST)
    return path


def everything(split):
    return split.rows(torch.arange(len(split)))


def rates_of(split):
    batch = everything(split)
    assert batch.targets.shape == (len(split), 1) and batch.targets.dtype == torch.float32
    return [round(rate, 2) for rate in batch.targets[:, 0].tolist()]


def test_targets_are_the_numbers_of_the_file_and_belong_to_their_series(folder):
    task = Tser(path=folder, validation_share=0.25)
    assert rates_of(task.split("test")) == TEST[1].tolist()
    known = {name: rates_of(task.split(name)) for name in ("train", "validation")}
    assert len(known["validation"]) == 10 and sorted(known["train"] + known["validation"]) == sorted(
        TRAIN[1].tolist()
    )
    inputs = everything(task.split("train")).inputs
    # normalised over all steps of training, and lengths are not needed
    assert inputs.shape == (30, STEPS, 2) and everything(task.split("test")).lengths is None
    torch.testing.assert_close(inputs.mean((0, 1)), torch.zeros(2), rtol=0, atol=1e-5)
    first = inputs[:, 0, 1].double() * task.split("train").std[0, 1] + task.split("train").mean[0, 1]
    np.testing.assert_allclose(first.numpy(), known["train"], rtol=1e-5)


def test_pooled_splits_are_70_15_and_15_of_100(folder):
    splits = [Tser(path=folder, splits="pooled", seed=seed) for seed in (0, 0, 1)]
    found = [[rates_of(task.split(name)) for name in ("train", "validation", "test")] for task in splits]
    assert [len(part) for part in found[0]] == [42, 9, 9]
    assert sorted(rate for part in found[0] for rate in part) == sorted([*TRAIN[1], *TEST[1]])
    assert found[0] == found[1] != found[2]


def test_scores_have_the_unit_of_the_file(folder):
    task: Task = Tser(path=folder).prepared()
    source: Source = task.split("test")
    assert isinstance(task, ScoredTask) and judged_by(task) == "mse" and task.n_features == 2
    scores = task.score(source.labels + 2.0, source)
    assert scores["rmse"] == pytest.approx(2, rel=1e-5) and scores["mse"] == pytest.approx(4, rel=1e-5)
    assert scores["mae"] == pytest.approx(2, rel=1e-5)
    mean = np.mean(rates_of(task.split("train")))
    assert task.chance == task.trivial_score == pytest.approx(np.mean((TEST[1] - mean) ** 2), rel=1e-5)
    constant = task.score(torch.full((N_TEST, 1), float(np.mean(TEST[1]))), source)
    assert constant["nrmse"] == pytest.approx(1, rel=1e-5)


def in_header(old, new):
    def damage(folder):
        path = folder / "BIDMC32HR_TRAIN.ts"
        path.write_text(path.read_text().replace(old, new))

    return damage


def second(line):
    def damage(folder):
        path = folder / "BIDMC32HR_TRAIN.ts"
        lines = path.read_text().splitlines()
        lines[11] = line
        path.write_text("\n".join(lines))

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda f: (f / "BIDMC32HR_TEST.ts").unlink(),
            r"a single data set; .*http://tseregression\.org, such as BIDMC",
        ),
        (in_header("@targetlabel true", "@classLabel true 60 70"), "in a line @targetLabel true; got 'none'"),
        (in_header("@targetlabel true", "@targetlabel false"), "in a line @targetLabel true; got 'false'"),
        (second("1,2:3,4:sixty"), "and a number in each line; got could not convert .* in line 12"),
        (second("1,2:3,4:nan"), "got a label 'nan' that is not finite in line 12"),
        (second("1,2:3,4:"), "got could not convert string to float: '' in line 12"),
        (second("60"), "got no values in line 12"),
    ],
)
def test_files_that_cannot_be_used_are_refused_in_one_line(folder, damage, message):
    damage(folder)
    with pytest.raises(DataError, match=message) as caught:
        Tser(path=folder).prepared()
    assert "\n" not in str(caught.value)


def test_missing_folders_and_wrong_sizes_are_refused(folder, tmp_path):
    with pytest.raises(DataError, match=r"got None\. Download a regression data set of http://tseregression"):
        Tser().prepared()
    with pytest.raises(DataError, match=r"gone does not exist\. .* pass this folder with --data\.path\."):
        Tser(path=tmp_path / "gone").prepared()
    with pytest.raises(ValueError, match=r"`n_dimensions` must be 2, as in .*BIDMC32HR; got 3"):
        Tser(path=folder, n_dimensions=3).prepared()


def test_the_recipe_trains_and_a_run_knows_the_sizes(folder, tmp_path):
    recipe = get_recipe("bidmc")
    assert config_from_dict(config_to_dict(recipe)) == recipe
    assert recipe.task.splits == "pooled" and not recipe.model.bidirectional
    model = dataclasses.replace(recipe.model, d_model=4, mixer_args={})
    loop = LoopConfig(device="cpu", batch_size=20, steps=2)
    result = fit(TrainConfig("tiny", Tser(path=folder), model, loop=loop), tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert (run.config.model.n_features, run.config.model.n_outputs) == (2, 1)
    with torch.no_grad():
        outputs = run.classifier()(everything(run.config.task.split("test")).inputs)
    off = outputs[:, 0].double() - torch.from_numpy(TEST[1])
    assert result.test["rmse"] == pytest.approx(float(off.square().mean().sqrt()), rel=1e-4)
