import dataclasses
import json

import numpy as np
import pytest
import torch
from PIL import Image

from linrec.lab.tasks import ImagesTask, ScoredTask, Task
from linrec.lab.tasks.photos import MEAN, STD, ImageFolders
from linrec.lab.train import ConfigError, TrainConfig, fit, get_recipe, load_run
from linrec.lab.train.config import config_from_dict, config_to_dict
from linrec.models import SequenceClassifierConfig
from linrec.text import DataError

CLASSES = ("n01440764", "n01443537", "n02102040")
COLOURS = ((250, 10, 10), (10, 250, 10), (10, 10, 250))


def write(folder, n):
    """Photographs of a class have its colour, and each its own size; the left half is darker."""
    for name, colour in zip(CLASSES, COLOURS, strict=True):
        (folder / name).mkdir(parents=True)
        for number in range(n):
            pixels = np.tile(np.array(colour, np.uint8), (20 + number, 30, 1))
            pixels[:, :15] //= 2
            Image.fromarray(pixels).save(folder / name / f"{name}_{number}.{'png' if number else 'JPEG'}")


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "imagenet"
    write(path / "train", 6)
    write(path / "val", 2)
    (path / "train" / "README.txt").write_text("no class")
    return path


def test_the_files_of_val_test_and_the_last_of_each_class_validate(folder):
    task: Task = ImageFolders(path=folder, size=8, n_validation=2).prepared()
    assert isinstance(task, ScoredTask) and isinstance(task, ImagesTask)
    assert (task.n_classes, task.n_outputs, task.chance) == (3, 3, 1 / 3)
    names = {part: [path.name for path in task.split(part).paths] for part in ("train", "validation", "test")}
    assert [len(of) for of in names.values()] == [12, 6, 6]
    assert names["validation"][:2] == [f"{CLASSES[0]}_4.png", f"{CLASSES[0]}_5.png"]
    assert all(path.parent.parent.name == "val" for path in task.split("test").paths)
    assert task.split("train").labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    test = task.split("test")
    assert task.score(test.labels, test)["accuracy"] == 1 and task.trivial_score == pytest.approx(1 / 3)


def test_images_are_central_crops_normalised_with_the_numbers_of_imagenet(folder):
    split = ImageFolders(path=folder, size=8, n_validation=1).split("test")
    batch = split.rows(torch.tensor([5, 1]))
    assert batch.inputs.shape == (2, 3, 8, 8) and batch.targets.tolist() == [2, 0]
    pixels = batch.inputs * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]
    for image, colour in zip(pixels, (COLOURS[2], COLOURS[0]), strict=True):
        right, left = torch.tensor(colour) / 255, torch.tensor([c // 2 for c in colour]) / 255
        torch.testing.assert_close(image[:, 4, 7], right, atol=0.01, rtol=0)
        torch.testing.assert_close(image[:, 4, 0], left, atol=0.01, rtol=0)


def test_crops_and_flips_depend_on_seed_epoch_and_image_alone(folder):
    split = ImageFolders(path=folder, size=8, n_validation=2).split("train")
    one = split.of_epoch(seed=0, epoch=3)
    index = torch.arange(12)
    first = one.rows(index).inputs
    assert torch.equal(first[[7, 2]], one.rows(torch.tensor([7, 2])).inputs)
    assert not torch.equal(first, split.of_epoch(seed=0, epoch=4).rows(index).inputs)
    assert not torch.equal(first, split.of_epoch(seed=1, epoch=3).rows(index).inputs)
    # about half of them are flipped: the darker half is at the right
    many = torch.cat([split.of_epoch(seed=0, epoch=epoch).rows(index).inputs for epoch in range(8)])
    left, right = many[:, :, 4, 0].sum(1), many[:, :, 4, -1].sum(1)
    assert int((left < right - 0.1).sum()) > 10 and int((left > right + 0.1).sum()) > 10


def test_a_folder_of_classes_is_split_at_random(tmp_path):
    write(tmp_path / "mini", 20)
    splits = [ImageFolders(path=tmp_path / "mini", seed=seed).split("test") for seed in (0, 0, 1)]
    assert [split.labels.tolist() for split in splits] == [[0, 0, 1, 1, 2, 2]] * 3
    assert splits[0].paths == splits[1].paths != splits[2].paths
    task = ImageFolders(path=tmp_path / "mini")
    every = [path for name in ("train", "validation", "test") for path in task.split(name).paths]
    assert len({*every}) == len(every) == 60


def test_folders_that_cannot_be_used_are_refused_in_one_line(folder, tmp_path):
    with pytest.raises(DataError, match=r"got None\. Get ImageNet-1k at .* --data.path"):
        ImageFolders().prepared()
    with pytest.raises(ValueError, match=r"`n_classes` must be 3, as in .*imagenet; got 1000"):
        ImageFolders(path=folder, n_classes=1000, n_validation=1).prepared()
    with pytest.raises(
        DataError, match=r"the class 'n01440764' .* has too few photographs for the split 'train'"
    ):
        ImageFolders(path=folder, n_validation=6).prepared()
    (empty := tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="must have a folder for each of at least 2 classes; it has 0"):
        ImageFolders(path=empty).prepared()
    broken = folder / "val" / CLASSES[0] / f"{CLASSES[0]}_0.JPEG"
    broken.write_bytes(broken.read_bytes()[:30])
    with pytest.raises(DataError, match=r"_0.JPEG cannot be read as an image: .*Get it again, or remove it"):
        ImageFolders(path=folder, size=8, n_validation=1).split("test").rows(torch.tensor([0]))
    for name in CLASSES[:1]:
        (folder / "val" / name).rename(folder / "val" / "other")
    with pytest.raises(DataError, match="the same classes in train and val; one lacks 'n01440764'"):
        ImageFolders(path=folder, n_validation=1).prepared()


def test_the_recipe_trains_and_its_model_is_read_again(folder, tmp_path):
    recipe = get_recipe("imagenet")
    assert config_from_dict(json.loads(json.dumps(config_to_dict(recipe)))) == recipe
    task = ImageFolders(path=folder, size=8, n_validation=2)
    model = dataclasses.replace(recipe.model, d_model=8, n_layers=1, patch_size=4, d_channel_mixing=8)
    loop = dataclasses.replace(
        recipe.loop, device="cpu", batch_size=6, steps=3, eval_every=2, precision="32-true"
    )
    optim = dataclasses.replace(recipe.optim, warmup_steps=1)
    result = fit(TrainConfig("tiny", task, model, optim, loop), tmp_path / "run")
    run = load_run(tmp_path / "run")
    batch = run.config.task.split("test").rows(torch.arange(6))
    with torch.no_grad():
        logits = run.image_classifier()(batch.inputs)
    assert logits.shape == (6, 3)
    loss = torch.nn.functional.cross_entropy(logits.double(), batch.targets)
    assert result.test["loss"] == pytest.approx(float(loss), rel=1e-4)
    with pytest.raises(ConfigError, match="is an image classifier, not a sequence classifier"):
        run.classifier()
    with pytest.raises(ConfigError, match="must be a ImageClassifierConfig for the task ImageFolders"):
        TrainConfig("wrong", task, SequenceClassifierConfig(n_outputs=3, n_features=1))
