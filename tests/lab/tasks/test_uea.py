import dataclasses
import json

import numpy as np
import pytest
import torch

from linrec.lab.tasks import ScoredTask, Source, Task
from linrec.lab.tasks.archives import Uea, read_ts
from linrec.lab.train import LoopConfig, TrainConfig, fit, get_recipe, load_run
from linrec.lab.train.config import config_from_dict, config_to_dict
from linrec.text import DataError

CLASSES = ["wild", "goa-1", "unc-1"]
N_TRAIN, N_TEST, DIMENSIONS, LONGEST = 40, 25, 3, 12
HEADER = """# A comment of the archive's, with a name: Müller
#
@problemName Worms
@timeStamps false
@missing true
@univariate false
@dimensions 3

@equalLength false
@classLabel true wild goa-1 unc-1
@data
"""


def draw(seed, n):
    """Series of unequal lengths, with a missing value here and there, and a class each."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 3, n)
    series = []
    for label in labels:
        one = random.normal(5 * label, 1 + label, (random.integers(4, LONGEST + 1), DIMENSIONS)).round(3)
        one[:, 2] *= 100
        one[random.random(one.shape) < 0.05] = np.nan
        series.append(one)
    return series, labels


def line(one, label):
    dimensions = [",".join("?" if np.isnan(v) else str(v) for v in column) for column in one.T]
    return ":".join([*dimensions, CLASSES[label]])


def write(path, series, labels, header=HEADER):
    lines = [line(one, label) for one, label in zip(series, labels, strict=True)]
    path.write_text(header + "\n".join(lines) + "\n", encoding="latin-1")


TRAIN, TEST = draw(1, N_TRAIN), draw(2, N_TEST)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "Worms"
    path.mkdir()
    # the third training series comes again there, and so does a series that tests
    train = [*TRAIN[0], TRAIN[0][2], TEST[0][4]], [*TRAIN[1], TRAIN[1][2], TEST[1][4]]
    # as does the seventh of testing
    test = [*TEST[0], TEST[0][7]], [*TEST[1], TEST[1][7]]
    write(path / "Worms_TRAIN.ts", *train)
    write(path / "Worms_TEST.ts", *test)
    (path / "Worms.txt").write_text("about the data")
    return path


def everything(split):
    return split.rows(torch.arange(len(split)))


def numbers_of(split):
    """Which series of TRAIN + TEST a split has, found by their first value of the last dimension."""
    together = [*TRAIN[0], *TEST[0]]
    values = split.values.numpy()
    found = []
    for one, length in zip(values, split.lengths.tolist(), strict=True):
        equal = [
            place
            for place, other in enumerate(together)
            if len(other) == length and np.allclose(one[:length], other, equal_nan=True)
        ]
        assert len(equal) == 1
        found += equal
    return found


def test_a_file_is_read_as_it_is_written(folder):
    file = read_ts(folder / "Worms_TEST.ts")
    assert file.classes == tuple(CLASSES) and file.labels.tolist() == [*TEST[1], TEST[1][7]]
    for read, written in zip(file.series[:-1], TEST[0], strict=True):
        assert read.dtype == np.float32
        np.testing.assert_array_equal(read, written.astype(np.float32))


def test_a_mark_of_the_encoding_is_no_part_of_a_file(folder):
    path = folder / "Worms_TEST.ts"
    before = read_ts(path)
    path.write_text("\ufeff" + path.read_text(encoding="latin-1"), encoding="utf-8")
    assert read_ts(path).labels.tolist() == before.labels.tolist()


def test_of_several_versions_of_a_data_set_the_original_is_read(folder):
    expected = everything(Uea(path=folder).split("test"))
    for variant in ("eq", "nmv"):
        for part in ("TRAIN", "TEST"):
            write(folder / f"Worms_{variant}_{part}.ts", [one[:4] for one in TEST[0][:9]], TEST[1][:9])
    found = everything(Uea(path=folder).split("test"))
    assert torch.equal(found.inputs, expected.inputs) and torch.equal(found.lengths, expected.lengths)
    for part in ("TRAIN", "TEST"):
        (folder / f"Worms_{part}.ts").unlink()
        (folder / f"Worms_nmv_{part}.ts").unlink()
    # one that is alone is a data set like others
    assert everything(Uea(path=folder, splits="pooled").split("test")).inputs.shape[1:] == (4, DIMENSIONS)


def test_splits_of_the_archive_test_its_test_file_and_learn_nothing_of_it(folder):
    task = Uea(path=folder, validation_share=0.25)
    train, validation = (numbers_of(task.split(name)) for name in ("train", "validation"))
    assert task.split("test").labels.tolist() == [*TEST[1], TEST[1][7]]
    assert numbers_of(task.split("test")) == [*range(N_TRAIN, N_TRAIN + N_TEST), N_TRAIN + 7]
    # what came twice is there once, and what tests not at all
    assert sorted(train + validation) == list(range(N_TRAIN))
    labels = np.bincount(TRAIN[1])
    assert (
        np.bincount(TRAIN[1][validation]).tolist() == (labels - np.rint(0.75 * labels)).astype(int).tolist()
    )
    for split, places in (("train", train), ("validation", validation)):
        assert task.split(split).labels.tolist() == TRAIN[1][places].tolist()
    again, other = (Uea(path=folder, validation_share=0.25, seed=seed) for seed in (0, 1))
    assert numbers_of(again.split("train")) == train != numbers_of(other.split("train"))


def test_pooled_splits_cut_all_different_series_at_random(folder):
    np.random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    tasks = [Uea(path=folder, splits="pooled", seed=seed) for seed in (0, 0, 1)]
    found = [[numbers_of(task.split(name)) for name in ("train", "validation", "test")] for task in tasks]
    # 65 different ones: 45.5 and 55.25 are the cuts
    assert [len(part) for part in found[0]] == [45, 10, 10]
    assert sorted(place for part in found[0] for place in part) == list(range(N_TRAIN + N_TEST))
    assert found[0] == found[1] != found[2]
    assert max(found[0][2]) >= N_TRAIN > min(found[0][2])
    assert torch.equal(before[0], torch.get_rng_state()) and (before[1] == np.random.get_state()[1]).all()


def test_series_are_normalised_by_the_training_split_padded_and_have_lengths(folder):
    task = Uea(path=folder, validation_share=0.25)
    known = np.concatenate([TRAIN[0][place] for place in numbers_of(task.split("train"))])
    mean, std = np.nanmean(known, axis=0), np.nanstd(known, axis=0)
    batch = everything(task.split("test"))
    assert batch.inputs.shape == (N_TEST + 1, LONGEST, DIMENSIONS) and batch.inputs.dtype == torch.float32
    assert batch.lengths.tolist() == [len(one) for one in [*TEST[0], TEST[0][7]]] and batch.reset is None
    for inputs, one in zip(batch.inputs.numpy(), TEST[0], strict=False):
        expected = np.nan_to_num((one - mean) / std)
        np.testing.assert_allclose(inputs[: len(one)], expected, rtol=1e-4, atol=1e-5)
        assert not inputs[len(one) :].any()


def test_series_of_one_length_and_one_dimension_need_no_lengths(tmp_path):
    random = np.random.default_rng(0)
    for part, n in (("TRAIN", 20), ("TEST", 6)):
        series = [random.normal(3, 2, (7, 1)).round(4) for _ in range(n)]
        write(tmp_path / f"GunPoint_{part}.ts", series, np.arange(n) % 3)
    task = Uea(path=tmp_path).prepared()
    batch = everything(task.split("train"))
    assert batch.inputs.shape[1:] == (7, 1) and batch.lengths is None and task.n_features == 1
    assert float(batch.inputs.mean()) == pytest.approx(0, abs=1e-5)
    assert float(batch.inputs.std(correction=0)) == pytest.approx(1, abs=1e-5)


def test_a_dimension_that_never_changes_is_zero(tmp_path):
    for part in ("TRAIN", "TEST"):
        series = [np.array([[i, 4.0, np.nan], [i + 1, 4.0, np.nan]]) for i in range(9)]
        write(
            tmp_path / f"Flat_{part}.ts",
            series[: 9 if part == "TRAIN" else 1],
            [0, 1, 2] * 3 if part == "TRAIN" else [0],
        )
    inputs = everything(Uea(path=tmp_path, validation_share=0.4).split("train")).inputs
    assert inputs.isfinite().all() and not inputs[:, :, 1:].any() and inputs[:, :, 0].any()


def test_the_files_tell_sizes_and_a_prepared_task_keeps_them(folder):
    task = Uea(path=folder)
    checked: Task = task
    assert isinstance(task, ScoredTask) and (task.n_features, task.n_outputs, task.vocab_size) == (
        None,
        1,
        None,
    )
    prepared = checked.prepared()
    assert (prepared.n_features, prepared.n_outputs) == (3, 3)
    assert prepared.split("test") is task.split("test")
    assert task.chance == prepared.chance == 1 / 3
    source: Source = task.split("test")
    majority = torch.bincount(task.split("train").labels).argmax()
    assert task.trivial_score == pytest.approx(float((source.labels == majority).double().mean()))
    scores = task.score(source.labels, source)
    assert scores == {"accuracy": 1.0, "accuracy_by_class": [1.0] * 3}
    assert source.of_epoch(seed=1, epoch=2) is source
    assert source.to("meta").rows(torch.tensor([3])).inputs.device.type == "meta"
    with pytest.raises(ValueError, match=r"`n_classes` must be 3, as in .*Worms; got 5. Leave it out"):
        Uea(path=folder, n_classes=5).prepared()


def changed(name, change):
    def damage(folder):
        path = folder / name
        path.write_text(change(path.read_text(encoding="latin-1")))

    return damage


def in_header(old, new):
    return changed("Worms_TRAIN.ts", lambda text: text.replace(old, new))


def third(line):
    def change(text):
        lines = text.splitlines()
        lines[13] = line
        return "\n".join(lines)

    return changed("Worms_TRAIN.ts", change)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda f: (f / "Worms_TEST.ts").unlink(),
            "must contain NAME_TRAIN.ts and NAME_TEST.ts of a single data set; it has",
        ),
        (
            lambda f: (f / "Worms_TEST.ts").unlink(),
            r"aeon-toolkit/EigenWorms.zip, unpack .* pass this folder with --data.path\.",
        ),
        (
            lambda f: write(f / "Other_TRAIN.ts", *TRAIN),
            "it has Other_TRAIN.ts, Worms_TEST.ts, Worms_TRAIN.ts",
        ),
        (in_header("@timeStamps false", "@timeStamps true"), "has time stamps; only series without"),
        (in_header("@timeStamps false", "@timeStamps"), "has time stamps; only series without"),
        (
            in_header("@classLabel true wild goa-1 unc-1", "@classLabel false"),
            "such as @classLabel true 1 2; got 'false'",
        ),
        (
            in_header("@classLabel true wild goa-1 unc-1", "@targetLabel true"),
            "got 'none'. Only classification data sets",
        ),
        (
            in_header("@classLabel true wild goa-1 unc-1", "@classLabel"),
            "such as @classLabel true 1 2; got ''",
        ),
        (in_header("@classLabel true wild goa-1 unc-1", "@"), "got 'none'. Only classification data sets"),
        (in_header("wild goa-1 unc-1", "wild unc-1 goa-1"), "must have the same classes; the training file"),
        (
            in_header("@data\n", ""),
            "must begin with lines of @, up to @data; got .* in line 11. It is not a .ts file",
        ),
        (
            changed("Worms_TEST.ts", lambda text: text.split("@data")[0] + "@data\n"),
            "has no series after its header",
        ),
        (third("1,2:3,4:5,6:worm"), "got a class 'worm' that is not in the header in line 14"),
        (
            third("1,2:3,4x:5,6:wild"),
            "got could not convert string to float: '4x' in line 14",
        ),
        (third("1,2:3,-inf:5,6:wild"), "got -inf, which is not a finite float32 number, in line 14"),
        (third("1,2:3,1e39:5,6:wild"), r"got 1e\+39, which is not a finite float32 number, in line 14"),
        (third("1,2:3:5,6:wild"), r"got dimensions of \[1, 2\] values in line 14"),
        (
            third("1,2:3,4:wild"),
            "got 2 dimensions after 3 in the first in line 14",
        ),
        (third("wild"), "got no values in line 14. It is damaged"),
    ],
)
def test_files_that_cannot_be_used_are_refused_in_one_line(folder, damage, message):
    damage(folder)
    with pytest.raises(DataError, match=message) as caught:
        Uea(path=folder).prepared()
    assert "\n" not in str(caught.value)


def test_files_of_other_dimensions_and_too_few_series_are_refused(folder):
    write(folder / "Worms_TEST.ts", [one[:, :2] for one in TEST[0]], TEST[1])
    with pytest.raises(DataError, match="same dimensions; the training file has 3, the test file 2"):
        Uea(path=folder).prepared()
    for part in ("TRAIN", "TEST"):
        write(folder / f"Worms_{part}.ts", TRAIN[0][:2], TRAIN[1][:2])
    with pytest.raises(DataError, match="has 4 series, too few for the split 'train'"):
        Uea(path=folder).prepared()


def test_missing_folders_and_fields_out_of_range_are_refused(tmp_path):
    with pytest.raises(
        DataError, match=r"got None. Download a data set of https://timeseriesclassification.com"
    ):
        Uea().prepared()
    with pytest.raises(DataError, match=r"gone does not exist. Download a data set"):
        Uea(path=tmp_path / "gone").prepared()
    with pytest.raises(DataError, match=r"it has none\. Download a data set"):
        Uea(path=tmp_path).prepared()
    with pytest.raises(ValueError, match="no `splits` 'pool'; did you mean 'pooled'"):
        Uea(splits="pool")
    with pytest.raises(ValueError, match="`validation_share` must be between 0 and 1; got 1"):
        Uea(validation_share=1)
    with pytest.raises(ValueError, match="`seed` must be at least 0; got -1"):
        Uea(seed=-1)


def test_the_recipe_trains_and_a_run_knows_the_sizes(folder, tmp_path):
    recipe = get_recipe("uea")
    assert config_from_dict(json.loads(json.dumps(config_to_dict(recipe)))) == recipe
    assert recipe.task.splits == "pooled" and not recipe.model.bidirectional
    model = dataclasses.replace(recipe.model, d_model=4, mixer_args={"d_state": 4})
    loop = LoopConfig(device="cpu", batch_size=20, steps=2)
    config = TrainConfig("tiny", Uea(path=folder, splits="pooled"), model, loop=loop)
    result = fit(config, tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert (run.config.model.n_features, run.config.model.n_outputs) == (3, 3)
    batch = everything(run.config.task.split("test"))
    with torch.no_grad():
        outputs = run.classifier()(batch.inputs, lengths=batch.lengths)
    right = (outputs.argmax(-1) == batch.targets).double().mean()
    assert result.test["accuracy"] == pytest.approx(float(right))
