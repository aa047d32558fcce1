import dataclasses
import gzip
import json
import math
import struct

import numpy as np
import pytest
import torch

from linrec.lab import tasks
from linrec.lab.tasks import ProbedTask, ScoredTask, SequentialImages, Source, Task
from linrec.lab.tasks.pixels import ImageGeneration
from linrec.lab.train import ConfigError, LoopConfig, TrainConfig, fit, get_recipe, load_run
from linrec.lab.train.config import config_from_dict, config_to_dict
from linrec.models import ModelConfig, SequenceClassifierConfig
from linrec.text import DataError

FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
N_TRAIN, N_TEST, ROWS, COLUMNS = 30, 12, 4, 3


def idx(array):
    """An IDX file of unsigned bytes, written from the format's description."""
    return struct.pack(f">BBBB{array.ndim}i", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def draw(n, seed):
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (n, ROWS, COLUMNS), dtype=np.uint8)
    # classes of unequal frequency, the lowest the most frequent
    return images, (rng.integers(0, 10, n) * rng.integers(0, 2, n)).astype(np.uint8)


TRAIN, TEST = draw(N_TRAIN, 1), draw(N_TEST, 2)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "images"
    path.mkdir()
    for name, array in zip(FILES, (*TRAIN, *TEST), strict=True):
        (path / name).write_bytes(idx(array))
    return path


@pytest.fixture
def grey(tmp_path):
    """Enough pixels for statistics of noise, none of them black or white."""
    path = tmp_path / "grey"
    path.mkdir()
    rng = np.random.default_rng(3)
    for part, n in (("train", 12), ("t10k", 40)):
        images = rng.integers(1, 255, (n, 20, 28), dtype=np.uint8)
        (path / f"{part}-images-idx3-ubyte").write_bytes(idx(images))
        (path / f"{part}-labels-idx1-ubyte").write_bytes(idx(rng.integers(0, 10, n, dtype=np.uint8)))
    return path


def everything(split):
    return split.rows(torch.arange(len(split)))


def test_sequences_are_the_rows_of_the_images_normalised_by_the_training_split(folder):
    task = SequentialImages(path=folder, n_validation=8)
    values = TRAIN[0][:-8].astype(np.float64) / 255
    mean, std = values.mean(), values.std()
    for name, (images, labels) in {
        "train": (TRAIN[0][:-8], TRAIN[1][:-8]),
        "validation": (TRAIN[0][-8:], TRAIN[1][-8:]),
        "test": TEST,
    }.items():
        batch = everything(task.split(name))
        # row after row, one number each
        expected = np.stack([np.concatenate([*image]) for image in images]).astype(np.float64)
        torch.testing.assert_close(
            batch.inputs[..., 0].double(),
            torch.from_numpy((expected / 255 - mean) / std),
            rtol=1e-5,
            atol=1e-6,
        )
        assert batch.inputs.shape == (len(images), ROWS * COLUMNS, 1) and batch.inputs.dtype == torch.float32
        assert batch.targets.tolist() == labels.tolist() and batch.reset is None
    inputs = everything(task.split("train")).inputs.double()
    assert abs(float(inputs.mean())) < 1e-6 and float(inputs.std(correction=0)) == pytest.approx(1, abs=1e-6)


def test_compressed_files_are_the_same_data(folder):
    plain = SequentialImages(path=folder, n_validation=8).split("train")
    for name in FILES:
        (folder / f"{name}.gz").write_bytes(gzip.compress((folder / name).read_bytes()))
        (folder / name).unlink()
    compressed = SequentialImages(path=folder, n_validation=8).split("train")
    assert torch.equal(plain.pixels, compressed.pixels) and torch.equal(plain.labels, compressed.labels)


def test_permuted_images_have_one_order_that_the_seed_alone_makes(folder):
    plain = SequentialImages(path=folder, n_validation=8)
    tasks_of = [SequentialImages(path=folder, n_validation=8, permuted=True, seed=seed) for seed in (0, 0, 1)]
    # the global random state is neither read nor changed
    torch.manual_seed(5)
    np.random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    orders = []
    for task in tasks_of:
        order = torch.from_numpy(np.random.default_rng(task.seed).permutation(ROWS * COLUMNS))
        assert sorted(order.tolist()) == list(range(ROWS * COLUMNS))
        for name in ("train", "validation", "test"):
            pixels = plain.split(name).pixels
            assert torch.equal(task.split(name).pixels, pixels[:, order])
            assert not torch.equal(task.split(name).pixels, pixels)
            assert torch.equal(task.split(name).labels, plain.split(name).labels)
        orders.append(order.tolist())
    assert orders[0] == orders[1] != orders[2]
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()


def test_the_order_of_reversed_bits_is_that_of_the_numbers_below_twelve(folder):
    plain = SequentialImages(path=folder, n_validation=8).split("test").pixels
    task = SequentialImages(path=folder, n_validation=8, permuted=True, permutation="bit-reversal")
    # 0 to 15 of four bits backwards, without what is no pixel: 0000, 1000, 0100, (1100,) 0010, ...
    order = [0, 8, 4, 2, 10, 6, 1, 9, 5, 3, 11, 7]
    assert torch.equal(task.split("test").pixels, plain[:, order])


def test_row_by_row_a_step_has_the_pixels_of_a_row(folder, tmp_path):
    with pytest.raises(DataError, match="must have 28 columns to be read row by row; they have 3"):
        SequentialImages(path=folder, n_validation=8, by_row=True).prepared()
    wide = tmp_path / "wide"
    wide.mkdir()
    images = np.random.default_rng(0).integers(0, 256, (12, 5, 28), dtype=np.uint8)
    for name in FILES:
        (wide / name).write_bytes(idx(images if "images" in name else TEST[1]))
    task = SequentialImages(path=wide, n_validation=2, by_row=True)
    inputs = everything(task.split("test")).inputs
    assert inputs.shape == (12, 5, 28) and task.n_features == 28
    pixels = everything(SequentialImages(path=wide, n_validation=2).split("test")).inputs
    assert torch.equal(inputs.flatten(1), pixels[..., 0])


def test_white_noise_is_added_to_the_pixels_before_they_are_normalised(grey):
    task = SequentialImages(path=grey, n_validation=2, permuted=True, test_noise=(0.1, 0.5))
    assert isinstance(task, ProbedTask) and list(task.probes) == ["noise 0.1", "noise 0.5"]
    test = task.split("test")
    clean = everything(test)
    without = SequentialImages(path=grey, n_validation=2, permuted=True)
    assert torch.equal(clean.inputs, everything(without.split("test")).inputs) and without.probes == {}
    units = []
    for level, probe in zip(task.test_noise, task.probes.values(), strict=True):
        batch = everything(probe)
        assert torch.equal(batch.targets, clean.targets) and batch.inputs.dtype == torch.float32
        units.append((batch.inputs - clean.inputs).double() * test.std / level)
    # the same noise at both levels, up to rounding
    torch.testing.assert_close(units[0], units[1], rtol=0, atol=1e-5)
    noise, n = units[1], units[1].numel()
    # mean, variance and correlations of independent standard normal numbers, within four standard errors
    assert abs(float(noise.mean())) < 4 / n**0.5 and abs(float(noise.var()) - 1) < 4 * (2 / n) ** 0.5
    for one, other in ((noise[1:], noise[:-1]), (noise[:, 1:], noise[:, :-1])):
        assert abs(float((one * other).mean())) < 4 / one.numel() ** 0.5
    # not clipped
    pixels = everything(task.probes["noise 0.5"]).inputs * test.std + test.mean
    assert pixels.min() < -0.5 and pixels.max() > 1.5


def test_noise_depends_only_on_the_seed_and_the_image(grey):
    fields = {"path": grey, "n_validation": 2, "test_noise": (0.2,), "test_salt_and_pepper": (0.3,)}
    torch.manual_seed(5)
    np.random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    task = SequentialImages(**fields)
    other = SequentialImages(**fields, seed=1)
    in_rows = SequentialImages(**fields, by_row=True)
    for name, probe in task.probes.items():
        whole = everything(probe).inputs
        assert torch.equal(everything(probe).inputs, whole)
        assert torch.equal(everything(SequentialImages(**fields).probes[name]).inputs, whole)
        parts = [probe.rows(index).inputs for index in torch.arange(len(probe)).split(7)]
        assert torch.equal(torch.cat(parts), whole)
        assert torch.equal(probe.rows(torch.tensor([9, 2, 9])).inputs, whole[[9, 2, 9]])
        assert torch.equal(everything(probe.to("cpu").of_epoch(seed=3, epoch=2)).inputs, whole)
        assert probe.to("meta").rows(torch.tensor([4])).inputs.shape == (1, 560, 1)
        assert torch.equal(everything(in_rows.probes[name]).inputs.flatten(1), whole[..., 0])
        assert not torch.equal(everything(other.probes[name]).inputs, whole)
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()


def test_salt_and_pepper_makes_a_share_of_the_pixels_black_or_white(grey):
    task = SequentialImages(path=grey, n_validation=2, test_salt_and_pepper=(0.1, 0.4, 1))
    names = ["salt-and-pepper 0.1", "salt-and-pepper 0.4", "salt-and-pepper 1.0"]
    assert list(task.probes) == names
    clean = task.split("test")
    n, before = clean.pixels.numel(), torch.zeros_like(clean.pixels, dtype=torch.bool)
    for level, probe in zip(task.test_salt_and_pepper, task.probes.values(), strict=True):
        black, white = probe.pixels == 0, probe.pixels == 255
        changed = black | white
        assert torch.equal(probe.pixels[~changed], clean.pixels[~changed])
        assert torch.equal(probe.labels, clean.labels) and probe.pixels.dtype == torch.uint8
        for mask in (black, white):
            share = level / 2
            assert abs(float(mask.double().mean()) - share) < 4 * (share * (1 - share) / n) ** 0.5
        # the pixels of a lower level are among them
        assert changed[before].all()
        before = changed
    assert before.all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"test_noise": (0.0, 0.1)}, r"`test_noise` must have positive .* deviations; got \(0.0, 0.1\). The"),
        ({"test_noise": (math.inf,)}, r"`test_noise` must have .* finite standard deviations; got \(inf,\)"),
        ({"test_noise": (math.nan,)}, r"`test_noise` must have positive and finite .*; got \(nan,\)"),
        ({"test_salt_and_pepper": (0,)}, r"`test_salt_and_pepper` must have shares above 0 .*; got \(0.0,\)"),
        ({"test_salt_and_pepper": (0.5, 1.5)}, r"shares above 0 and at most 1; got \(0.5, 1.5\). The test"),
    ],
)
def test_levels_of_noise_out_of_range_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        SequentialImages(**fields)


def test_rows_are_those_asked_for_and_epochs_change_nothing(folder):
    split = SequentialImages(path=folder, n_validation=8).split("train")
    index = torch.tensor([4, 0, 4])
    assert torch.equal(split.rows(index).inputs, everything(split).inputs[index])
    assert torch.equal(split.rows(index).targets, everything(split).targets[index])
    assert split.of_epoch(seed=1, epoch=2) is split
    assert split.to("meta").rows(index).inputs.device.type == "meta"


def test_it_is_a_task_and_says_what_needs_no_model(folder):
    task: Task = SequentialImages(path=folder, n_validation=8)
    source: Source = task.split("test")
    assert isinstance(task, ScoredTask) and len(source) == N_TEST and task.prepared() is task
    assert (task.vocab_size, task.n_features, task.n_outputs, task.chance) == (None, 1, 10, 0.1)
    assert tasks.get("sequential-images") is SequentialImages
    majority = np.bincount(TRAIN[1][:-8]).argmax()
    assert task.trivial_score == pytest.approx((TEST[1] == majority).mean())
    with pytest.raises(ValueError, match="no split 'tset'; did you mean 'test'"):
        task.split("tset")


def test_scores_are_shares_of_images(folder):
    task = SequentialImages(path=folder, n_validation=8)
    split = task.split("test")
    assert task.score(split.labels, split)["accuracy"] == 1
    predictions = split.labels.clone()
    predictions[0] = (predictions[0] + 1) % 10
    scores = task.score(predictions, split)
    assert scores["accuracy"] == pytest.approx(1 - 1 / N_TEST)
    for number, share in enumerate(scores["accuracy_by_class"]):
        count = int((TEST[1] == number).sum())
        wrong = number == TEST[1][0]
        assert share == (pytest.approx(1 - wrong / count) if count else None)
    assert json.loads(json.dumps(scores)) == scores
    with pytest.raises(TypeError, match=r"integer classes; got torch.float32. Pass logits.argmax\(-1\)"):
        task.score(torch.zeros(N_TEST), split)
    with pytest.raises(ValueError, match=r"must have the shape of the targets, \(12,\); got \(3,\)"):
        task.score(predictions[:3], split)


def replaced(name, change):
    def damage(folder):
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return damage


def compressed(change):
    def damage(folder):
        (folder / f"{FILES[0]}.gz").write_bytes(change(gzip.compress((folder / FILES[0]).read_bytes())))
        (folder / FILES[0]).unlink()

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: (folder / FILES[3]).unlink(),
            "has neither t10k-labels-idx1-ubyte nor t10k-labels.*gz",
        ),
        (
            lambda folder: (folder / FILES[3]).unlink(),
            r"package dataset-fashion-mnist installs .* of MNIST are at https://.*mnist/\. .*--data.path",
        ),
        (
            replaced(FILES[0], lambda b: b[:-1]),
            r"must have 360 bytes of shape \(30, 4, 3\); it has 359 after",
        ),
        (replaced(FILES[0], lambda b: b + b"x"), "it has 361 after its header"),
        (replaced(FILES[0], lambda b: b[:9]), "must have sizes in its first 16 bytes.*truncated or damaged"),
        (replaced(FILES[0], lambda b: b""), "begins with nothing"),
        (replaced(FILES[0], lambda b: idx(TRAIN[1])), "3 axes .* with 00000803; it begins with 00000801"),
        (replaced(FILES[1], gzip.compress), "1 axes .* with 00000801; it begins with 1f8b"),
        (replaced(FILES[1], lambda b: idx(TRAIN[1][:-2])), "as many labels as images; .* has 30, .* 28"),
        (replaced(FILES[1], lambda b: idx(TRAIN[1] + 10)), "must be 0 to 9; got 1"),
        (
            replaced(FILES[2], lambda b: idx(TEST[0][:, 1:])),
            "have 4 x 3 pixels, test images 3 x 3",
        ),
        (replaced(FILES[0], lambda b: idx(TRAIN[0] * 0)), "a channel that is constant"),
        (replaced(FILES[0], lambda b: idx(TRAIN[0][:, :0])), r"has no pixels: its shape is \(30, 0, 3\)"),
        (compressed(lambda b: b[:-12]), r"ubyte.gz is truncated: the compressed data have no end"),
        (compressed(lambda b: b"<html>" + b), "is not a gzip file, or it is damaged: .* remove .gz"),
        (compressed(lambda b: b[:40] + bytes(20) + b[60:]), "is not a gzip file, or it is damaged"),
    ],
)
def test_files_that_cannot_be_used_are_refused_in_one_line(folder, damage, message):
    damage(folder)
    with pytest.raises(DataError, match=message) as caught:
        SequentialImages(path=folder, n_validation=8).prepared()
    assert "\n" not in str(caught.value)


def test_folders_and_fields_that_cannot_be_used_are_refused(folder):
    with pytest.raises(DataError, match=r"`path` must be the path of the files; got None.*fashion-mnist"):
        SequentialImages().prepared()
    with pytest.raises(DataError, match=r"gone does not exist. It must be .* the four files"):
        SequentialImages(path=folder / "gone").prepared()
    with pytest.raises(DataError, match="ubyte is not a folder"):
        SequentialImages(path=folder / FILES[0]).prepared()
    with pytest.raises(DataError, match=r"`n_validation` must be less than the 30 training images.*; got 30"):
        SequentialImages(path=folder, n_validation=30).prepared()
    with pytest.raises(ValueError, match="`n_validation` must be at least 1; got 0"):
        SequentialImages(n_validation=0)
    with pytest.raises(ValueError, match="`seed` must be at least 0; got -1"):
        SequentialImages(seed=-1)
    with pytest.raises(ValueError, match="`permutation` = 'bit-reversal' needs `permuted` = True"):
        SequentialImages(permutation="bit-reversal")
    with pytest.raises(ValueError, match=r"`permutation` 'bitreversal'.*did you mean 'bit-reversal'"):
        SequentialImages(permuted=True, permutation="bitreversal")


def tiny(folder, **loop):
    model = SequenceClassifierConfig(n_outputs=1, n_features=5, d_model=8, n_layers=1, bidirectional=False)
    options = {"device": "cpu", "batch_size": 5, "steps": 4, **loop}
    return TrainConfig(
        "tiny", SequentialImages(path=folder, n_validation=8), model, loop=LoopConfig(**options)
    )


def test_a_classifier_trains_and_its_scores_are_those_of_the_rebuilt_model(folder, tmp_path):
    config = tiny(folder, keep="best", eval_every=2, accumulate=5)
    assert (config.model.n_outputs, config.model.n_features) == (10, 1)
    result = fit(config, tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert run.config == config
    batch = everything(config.task.split("test"))
    with torch.no_grad():
        logits = run.classifier()(batch.inputs)
    # 12 images in batches of 5: what fills the last one counts for nothing
    loss = torch.nn.functional.cross_entropy(logits.double(), batch.targets)
    assert result.test["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert result.test["accuracy"] == pytest.approx(
        float((logits.argmax(-1) == batch.targets).double().mean())
    )
    assert math.isfinite(result.validation["loss"])
    with pytest.raises(ConfigError, match="is a sequence classifier, not a language model"):
        run.model()


def test_images_with_noise_are_scored_after_training(folder, tmp_path):
    config = tiny(folder)
    task = dataclasses.replace(config.task, test_noise=(0.5,), test_salt_and_pepper=(0.25,))
    result = fit(dataclasses.replace(config, task=task), tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert run.config.task == task and result.probes.keys() == {"noise 0.5", "salt-and-pepper 0.25"}
    for name, scores in result.probes.items():
        batch = everything(task.probes[name])
        with torch.no_grad():
            logits = run.classifier()(batch.inputs)
        loss = torch.nn.functional.cross_entropy(logits.double(), batch.targets)
        assert scores["loss"] == pytest.approx(float(loss), rel=1e-5) != result.test["loss"]


def test_the_recipe_is_causal_and_survives_json():
    config = get_recipe("sequential-fashion-mnist")
    assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config
    assert not config.model.bidirectional and config.model.mixer_args["d_state"] == 64


def test_models_of_the_wrong_kind_are_refused(folder):
    with pytest.raises(ConfigError, match="must be a SequenceClassifierConfig for the task SequentialImages"):
        TrainConfig("wrong", SequentialImages(), ModelConfig(vocab_size=4))
    classifier = SequenceClassifierConfig(n_outputs=10, n_features=1)
    with pytest.raises(ConfigError, match="must be a ModelConfig for the task MemoryHorizon"):
        TrainConfig("wrong", tasks.MemoryHorizon(), classifier)
    with pytest.raises(ConfigError, match=r"`loop.recompute` is for language models"):
        tiny(folder, recompute=True)
    with pytest.raises(ConfigError, match=r"`model.pooling` must be 'mean' or 'last'.*; got 'none'"):
        TrainConfig("wrong", SequentialImages(), dataclasses.replace(classifier, pooling="none"))


def test_generation_asks_for_each_pixel_and_shows_the_pixels_before(folder, tmp_path):
    task: Task = ImageGeneration(path=folder, n_validation=8)
    assert not isinstance(task, ScoredTask) and task.prepared() is task
    for name, images in {"train": TRAIN[0][:-8], "validation": TRAIN[0][-8:], "test": TEST[0]}.items():
        batch = everything(task.split(name))
        assert batch.targets.tolist() == images.reshape(len(images), -1).tolist()
        assert batch.inputs[:, 0].eq(256).all() and torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    majority = np.bincount(TRAIN[0][:-8].reshape(-1)).argmax()
    assert task.trivial_score == pytest.approx((TEST[0] == majority).mean())
    # the loss is in nats per pixel; bits per dimension are the loss / ln 2
    recipe = get_recipe("mnist-generation")
    model = dataclasses.replace(recipe.model, d_model=8, n_layers=1, d_channel_mixing=8)
    config = TrainConfig("tiny", task, model, loop=LoopConfig(device="cpu", batch_size=5, steps=2))
    result = fit(config, tmp_path / "run")
    batch = everything(task.split("test"))
    with torch.no_grad():
        logits, _ = load_run(tmp_path / "run").model()(batch.inputs)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
    assert result.test["loss"] == pytest.approx(float(loss), rel=1e-4)


def test_generation_refuses_unknown_images_and_missing_files(folder):
    with pytest.raises(ValueError, match="no `images` 'cifar'; did you mean 'cifar10'"):
        ImageGeneration(images="cifar")
    with pytest.raises(DataError, match=r"got None\. .*ossci-datasets.*cifar-10-binary"):
        ImageGeneration().prepared()
    with pytest.raises(DataError, match="`n_validation` must be less than the 30 training images"):
        ImageGeneration(path=folder, n_validation=30).prepared()
    with pytest.raises(DataError, match=r"has no data_batch_1\.bin"):
        ImageGeneration(path=folder, images="cifar10").prepared()
