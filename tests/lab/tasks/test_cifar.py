import dataclasses
import json

import numpy as np
import pytest
import torch
from PIL import Image

from linrec.lab.tasks import ScoredTask, Source, Task
from linrec.lab.tasks.cifar import NoisePaddedCIFAR, SequentialCIFAR
from linrec.lab.tasks.pixels import ImageGeneration
from linrec.lab.train import LoopConfig, TrainConfig, fit, get_recipe
from linrec.lab.train.config import config_from_dict, config_to_dict
from linrec.models import SequenceClassifierConfig
from linrec.text import DataError
from tests.lab.tasks.cifar import NAMES, TEST, TRAIN, folder, pack, pack_empty, rows, write_cifar100

__all__ = ["folder"]
# of every kind a damaged one, and what is said of it
WHERE = "Download https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz, and pass .* --data.path"


def inputs_of(task, name):
    split = task.split(name)
    return split.rows(torch.arange(len(split))).inputs


def test_a_step_is_the_red_green_and_blue_of_a_pixel_normalised_by_the_training_split(folder):
    task = SequentialCIFAR(path=folder, n_validation=7)
    values = TRAIN[0][:-7].transpose(0, 2, 3, 1).reshape(-1, 3) / 255
    mean, std = values.mean(0), values.std(0)
    for name, (images, labels) in {
        "train": (TRAIN[0][:-7], TRAIN[1][:-7]),
        "validation": (TRAIN[0][-7:], TRAIN[1][-7:]),
        "test": TEST,
    }.items():
        inputs = inputs_of(task, name)
        assert inputs.shape == (len(images), 1024, 3) and inputs.dtype == torch.float32
        for row, column in ((0, 0), (0, 31), (5, 17), (31, 2)):
            expected = (images[:, :, row, column] / 255 - mean) / std
            np.testing.assert_allclose(inputs[:, 32 * row + column], expected, rtol=1e-5, atol=1e-6)
        assert task.split(name).labels.tolist() == labels.tolist()


def test_grey_is_that_of_other_programs(folder):
    for part, images in (("train", TRAIN[0][:-7]), ("test", TEST[0])):
        bytes_of = SequentialCIFAR(path=folder, n_validation=7, grey=True).split(part).pixels[..., 0]
        for image, found in zip(images, bytes_of, strict=True):
            grey = Image.fromarray(image.transpose(1, 2, 0)).convert("L")
            assert found.tolist() == np.asarray(grey).reshape(-1).tolist()
    task = SequentialCIFAR(path=folder, n_validation=7, grey=True)
    inputs = inputs_of(task, "train").double()
    assert inputs.shape == (13, 1024, 1) and task.n_features == 1
    assert abs(float(inputs.mean())) < 1e-6 and float(inputs.std(correction=0)) == pytest.approx(1, abs=1e-6)


def test_grey_pixels_may_be_tokens(folder):
    task = SequentialCIFAR(path=folder, n_validation=7, grey=True, tokens=True)
    assert (task.vocab_size, task.n_features) == (256, None)
    grey = SequentialCIFAR(path=folder, n_validation=7, grey=True)
    for name in ("train", "validation", "test"):
        tokens = inputs_of(task, name)
        assert tokens.dtype == torch.int64 and torch.equal(tokens, grey.split(name).pixels[..., 0].long())
        assert torch.equal(task.split(name).labels, grey.split(name).labels)
    for wrong in ({}, {"grey": True, "by_row": True}):
        with pytest.raises(
            ValueError, match="`tokens` needs `grey` = True and `by_row` = False; got `grey` = "
        ):
            SequentialCIFAR(tokens=True, **wrong)
    with pytest.raises(
        ValueError, match=r"need `tokens` = False; got `tokens` = True with \(\) and \(0.1,\)"
    ):
        SequentialCIFAR(grey=True, tokens=True, test_salt_and_pepper=(0.1,))


def test_row_by_row_and_in_the_order_of_reversed_bits(folder):
    plain = SequentialCIFAR(path=folder, n_validation=7).split("test").pixels
    task = SequentialCIFAR(path=folder, n_validation=7, by_row=True)
    assert task.n_features == 96 and torch.equal(task.split("test").pixels, plain.reshape(-1, 32, 96))
    permuted = SequentialCIFAR(path=folder, n_validation=7, permuted=True, permutation="bit-reversal")
    # 0, 512, 256, 768, 128: halves, quarters, eighths of 1,024
    assert torch.equal(permuted.split("test").pixels[:, :5], plain[:, [0, 512, 256, 768, 128]])


@pytest.mark.parametrize("by_row", [False, True])
def test_salt_and_pepper_changes_all_colours_of_a_pixel(folder, by_row):
    task = SequentialCIFAR(path=folder, n_validation=7, by_row=by_row, test_salt_and_pepper=(0.5,))
    probe = task.probes["salt-and-pepper 0.5"]
    pixels, clean = (split.pixels.reshape(-1, 3) for split in (probe, task.split("test")))
    changed = (pixels != clean).any(1)
    assert ((pixels[changed] == 0) | (pixels[changed] == 255)).all()
    assert torch.equal(pixels[changed].amin(1), pixels[changed].amax(1))
    assert abs(float(changed.double().mean()) - 0.5) < 4 * (0.25 / len(pixels)) ** 0.5


def test_the_folder_around_it_and_the_archive_are_the_same_data(folder, tmp_path):
    expected = SequentialCIFAR(path=folder, n_validation=7).split("train")
    archive = pack(tmp_path / "cifar-10-binary.tar.gz", folder)
    before = sorted(tmp_path.rglob("*"))
    for path in (folder.parent, archive):
        found = SequentialCIFAR(path=path, n_validation=7).split("train")
        assert torch.equal(found.pixels, expected.pixels) and torch.equal(found.labels, expected.labels)
    # nothing was unpacked
    assert sorted(tmp_path.rglob("*")) == before


def test_the_version_for_python_is_not_read(folder, tmp_path):
    pickles = tmp_path / "cifar-10-batches-py"
    pickles.mkdir()
    # would raise if it were unpickled
    (pickles / "data_batch_1").write_bytes(b"cos\nabort\n(tR.")
    (around := tmp_path / "around").mkdir()
    pickles.rename(around / pickles.name)
    archive = pack_empty(tmp_path / "cifar-10-python.tar.gz", "cifar-10-batches-py/data_batch_1")
    for path in (around, around / pickles.name, archive):
        message = f"has the Python version of CIFAR-10. Its pickles .* are not read.* {WHERE}"
        with pytest.raises(DataError, match=message) as caught:
            SequentialCIFAR(path=path).prepared()
        assert "\n" not in str(caught.value)


def replaced(name, change):
    def damage(folder):
        (folder / name).write_bytes(change((folder / name).read_bytes()))
        return folder

    return damage


def archived(change):
    def damage(folder):
        path = pack(folder.parent / "cifar.tar.gz", folder)
        path.write_bytes(change(path.read_bytes()))
        return path

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: folder / "gone",
            f"gone.* does not exist. .* binary version of CIFAR-10. {WHERE}",
        ),
        (
            lambda folder: (folder / NAMES[2]).unlink() or folder,
            f"has no data_batch_3.bin, .* 6 files of CIFAR-10. {WHERE}",
        ),
        (lambda folder: pack_empty(folder / "x.tar.gz", "other"), f"has no data_batch_1.bin, .* {WHERE}"),
        (replaced(NAMES[1], lambda b: b[:-1]), "data_batch_2.bin of .* rows of 3073 bytes.*; it has 12291"),
        (replaced(NAMES[5], lambda b: b""), "test_batch.bin of .* rows of 3073 bytes.*; it has 0 bytes"),
        (
            replaced(NAMES[5], lambda b: rows(TEST[0], TEST[1] + 10)),
            "must be 0 to 9; got 1.*of another data set",
        ),
        (archived(lambda b: b[: len(b) // 2]), "is not a tar archive, or it is truncated or damaged"),
        (archived(lambda b: b[:-4]), "is not a tar archive, or it is truncated or damaged"),
        # the sum of its content, before its length
        (
            archived(lambda b: b[:-8] + bytes(4) + b[-4:]),
            "is not a tar archive, or it is truncated or damaged",
        ),
        (archived(lambda b: b"<html>"), f"is not a tar archive, or it is truncated or damaged. {WHERE}"),
    ],
)
def test_files_that_cannot_be_used_are_refused_in_one_line(folder, damage, message):
    with pytest.raises(DataError, match=message) as caught:
        SequentialCIFAR(path=damage(folder), n_validation=7).prepared()
    assert "\n" not in str(caught.value)


def test_it_is_a_task_and_survives_json(folder):
    task: Task = SequentialCIFAR(path=folder, n_validation=7)
    assert isinstance(task, Task) and isinstance(task, ScoredTask) and task.prepared() is task
    majority = np.bincount(TRAIN[1][:-7]).argmax()
    assert task.trivial_score == pytest.approx((TEST[1] == majority).mean())
    for name, features in (("sequential-cifar", 3), ("lra-image", 1), ("lra-image-colour", 3)):
        config = get_recipe(name)
        assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config
        assert config.model.n_features == features and config.model.n_outputs == 10
        assert config.name == name
    with pytest.raises(DataError, match=f"`path` must be the path of the files; got None. .* {WHERE}"):
        get_recipe("lra-image").task.prepared()


@pytest.mark.parametrize("options", [{}, {"grey": True, "tokens": True}])
def test_a_classifier_trains(folder, tmp_path, options):
    model = SequenceClassifierConfig(n_outputs=1, n_features=1, d_model=8, n_layers=1, bidirectional=False)
    loop = LoopConfig(device="cpu", batch_size=4, steps=2, eval_every=2)
    task = SequentialCIFAR(path=folder, n_validation=7, **options)
    result = fit(TrainConfig("tiny", task, model, loop=loop), tmp_path / "run")
    assert 0 < result.test["loss"] < 10 and len(result.test["accuracy_by_class"]) == 10


def everything(split):
    return split.rows(torch.arange(len(split)))


def make(path, **fields):
    return NoisePaddedCIFAR(path=path, n_validation=7, **{"length": 100, **fields})


def test_the_rows_of_an_image_come_first_and_noise_after_them(folder):
    task = make(folder)
    split: Source = task.split("test")
    batch = everything(split)
    assert batch.inputs.shape == (len(TEST[1]), 100, 96) and batch.inputs.dtype == torch.float32
    rows = SequentialCIFAR(path=folder, n_validation=7, by_row=True).split("test")
    assert torch.equal(batch.inputs[:, :32], everything(rows).inputs)
    assert batch.targets.tolist() == TEST[1].tolist() and len(split) == len(TEST[1])
    noise = batch.inputs[:, 32:].double()
    n = noise.numel()
    # mean, variance and correlations of independent standard normal numbers, within four standard errors
    assert abs(float(noise.mean())) < 4 / n**0.5 and abs(float(noise.var()) - 1) < 4 * (2 / n) ** 0.5
    for one, other in (
        (noise[1:], noise[:-1]),
        (noise[:, 1:], noise[:, :-1]),
        (noise[..., 1:], noise[..., :-1]),
    ):
        assert abs(float((one * other).mean())) < 4 / one.numel() ** 0.5


def test_noise_is_of_the_image_the_split_the_epoch_and_the_seed(folder):
    task = make(folder)
    train = task.split("train")
    noise = everything(train).inputs[:, 32:]
    # whatever else is in the batch
    assert torch.equal(train.rows(torch.tensor([5, 2])).inputs[:, 32:], noise[[5, 2]])
    assert torch.equal(everything(make(folder).split("train")).inputs[:, 32:], noise)
    others = [
        everything(make(folder, seed=1).split("train")),
        everything(train.of_epoch(seed=0, epoch=0)),
        everything(train.of_epoch(seed=0, epoch=1)),
        everything(train.of_epoch(seed=1, epoch=0)),
        everything(task.split("validation")),
    ]
    first = [batch.inputs[0, 32:] for batch in others]
    assert all(not torch.isin(one, noise[0]).any() for one in first)
    assert all(not torch.equal(one, other) for i, one in enumerate(first) for other in first[:i])
    images = everything(train).inputs[:, :32]
    assert all(torch.equal(batch.inputs[:, :32], images) for batch in others[:4])
    again = everything(task.split("train").of_epoch(seed=0, epoch=1))
    assert torch.equal(again.inputs, others[2].inputs)


def test_the_global_random_state_is_neither_read_nor_changed(folder):
    torch.manual_seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    everything(make(folder).split("train"))
    assert torch.equal(before[0], torch.get_rng_state()) and (before[1] == np.random.get_state()[1]).all()


def test_fixed_noise_is_the_same_for_all(folder):
    task = make(folder, noise="fixed")
    noises = [everything(task.split(name)).inputs[:, 32:] for name in ("train", "validation", "test")]
    noises.append(everything(task.split("train").of_epoch(seed=0, epoch=1)).inputs[:, 32:])
    for noise in noises:
        assert torch.equal(noise, noises[0][:1].expand_as(noise))
    assert noises[0][0].std() > 0.9
    other = make(folder, noise="fixed", seed=1).split("test").rows(torch.tensor([0])).inputs[0, 32:]
    assert not torch.isin(other, noises[0][0]).any()


def test_it_is_a_task_and_says_what_needs_no_model(folder):
    task: Task = make(folder)
    assert isinstance(task, Task) and isinstance(task, ScoredTask)
    assert (task.vocab_size, task.n_features, task.n_outputs, task.chance) == (None, 96, 10, 0.1)
    majority = np.bincount(TRAIN[1][:-7]).argmax()
    assert task.trivial_score == pytest.approx((TEST[1] == majority).mean()) and majority in TEST[1]
    test = task.split("test")
    assert task.score(test.labels, test)["accuracy"] == 1


def test_what_is_refused():
    with pytest.raises(ValueError, match="`length` must be at least 32; got 31"):
        NoisePaddedCIFAR(length=31)
    with pytest.raises(ValueError, match=r"`noise` 'fixd'.*did you mean 'fixed'"):
        NoisePaddedCIFAR(noise="fixd")
    with pytest.raises(DataError, match=r"got None. It must be the binary version of CIFAR-10.*--data.path"):
        NoisePaddedCIFAR().prepared()


def test_cifar_100_has_fine_and_coarse_labels(folder, tmp_path):
    path = write_cifar100(tmp_path / "cifar-100-binary")
    archive = pack(tmp_path / "cifar-100-binary.tar.gz", path, "cifar-100-binary")
    pixels = SequentialCIFAR(path=folder, n_validation=7).split("test").pixels
    for n_classes, first in ((100, 90), (20, 0)):
        for place in (path, tmp_path, archive):
            task = SequentialCIFAR(path=place, n_validation=7, n_classes=n_classes)
            assert torch.equal(task.split("test").pixels, pixels)
            assert (task.split("test").labels - first).tolist() == TEST[1].tolist()
            assert (task.n_outputs, task.chance) == (n_classes, 1 / n_classes)
    with pytest.raises(
        DataError, match=r"no train.bin, which is one of the 2 files of CIFAR-100. .*cifar-100-b"
    ):
        SequentialCIFAR(path=folder, n_classes=100).prepared()
    with pytest.raises(DataError, match=r"has no data_batch_1.bin, .*CIFAR-10"):
        SequentialCIFAR(path=path).prepared()
    pickles = pack_empty(tmp_path / "python.tar.gz", "cifar-100-python/train")
    with pytest.raises(DataError, match="has the Python version of CIFAR-100"):
        SequentialCIFAR(path=pickles, n_classes=100).prepared()
    generated = ImageGeneration(path=path, images="cifar100", n_validation=7).split("test")
    assert torch.equal(generated.values, pixels.flatten(1))
    with pytest.raises(ValueError, match="`n_classes` must be 10, 20 or 100; got 50"):
        SequentialCIFAR(n_classes=50)


def test_generation_asks_for_red_green_and_blue_of_each_pixel(folder):
    recipe = get_recipe("cifar-generation")
    task = dataclasses.replace(recipe.task, path=folder, n_validation=7)
    assert isinstance(task, Task) and (recipe.model.vocab_size, recipe.model.n_outputs) == (257, 257)
    for name, images in {"train": TRAIN[0][:-7], "validation": TRAIN[0][-7:], "test": TEST[0]}.items():
        batch = everything(task.split(name))
        assert batch.targets.tolist() == images.transpose(0, 2, 3, 1).reshape(-1, 3072).tolist()
