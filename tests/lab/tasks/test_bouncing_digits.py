import dataclasses
import json
import math
import struct

import numpy as np
import pytest
import torch

from linrec.lab.tasks import ProbedTask, ScoredTask, Source, Task, judged_by
from linrec.lab.tasks.bouncing_digits import BouncingDigits
from linrec.lab.train import LoopConfig, TrainConfig, fit, get_recipe
from linrec.lab.train.config import config_from_dict, config_to_dict
from linrec.text import DataError

N_IMAGES, N_VALIDATING, N_TESTING, ROWS, COLUMNS = 20, 6, 8, 4, 3
FEW = {"n_train": 30, "n_validation": 10, "n_test": 12, "n_validation_images": N_VALIDATING, "size": 10}


def idx(array):
    """An IDX file of unsigned bytes, written from the format's description."""
    return struct.pack(f">BBBB{array.ndim}i", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def make(path, seed, shape=(ROWS, COLUMNS)):
    """The four files, of images without black pixels whose corners say which they are; return the images."""
    path.mkdir()
    images = {}
    for place, (part, n) in enumerate({"train": N_IMAGES, "t10k": N_TESTING}.items()):
        images[part] = np.random.default_rng(seed).integers(1, 100, (n, *shape), dtype=np.uint8)
        images[part][:, 0, 0] = 100 + 100 * place + np.arange(n)
        (path / f"{part}-images-idx3-ubyte").write_bytes(idx(images[part]))
        (path / f"{part}-labels-idx1-ubyte").write_bytes(idx(np.zeros(n, np.uint8)))
    return images


@pytest.fixture
def data(tmp_path):
    return tmp_path / "mnist", make(tmp_path / "mnist", 1)


@pytest.fixture
def folder(data):
    return data[0]


def everything(split):
    return split.rows(torch.arange(len(split)))


def films(task, name):
    """All frames of a split, of what is shown and what is asked for: (n, length, side, side)."""
    split = dataclasses.replace(task.split(name), shown=None)
    batch = everything(split)
    frames = torch.cat([batch.inputs[:, :1], batch.targets], dim=1)
    side = task.size // task.shrink
    return (255 * frames).round().long().reshape(len(split), -1, side, side)


def test_a_film_has_the_chosen_images_at_their_places_the_brighter_pixel_on_top(data):
    task = BouncingDigits(path=data[0], n_digits=3, **FEW)
    parts = {"train": data[1]["train"][:-N_VALIDATING], "validation": data[1]["train"][-N_VALIDATING:]}
    parts["test"] = data[1]["t10k"]
    for name, images in parts.items():
        split, frames = task.split(name), films(task, name)
        assert len(split) == FEW[f"n_{name}"] and frames.shape[1] == 20
        assert set(split.chosen.flatten().tolist()) <= set(range(len(images)))
        for film in range(4):
            for frame in (0, 7, 19):
                expected = np.zeros((10, 10), np.int64)
                for image, (row, column) in zip(
                    split.chosen[film], split.places[film, frame].tolist(), strict=True
                ):
                    for i in range(ROWS):
                        for j in range(COLUMNS):
                            there = expected[row + i, column + j]
                            expected[row + i, column + j] = max(there, images[image, i, j])
                assert frames[film, frame].tolist() == expected.tolist()


def test_splits_have_images_of_their_own(data):
    task = BouncingDigits(path=data[0], **FEW)
    # the corner of every image is brighter than all other pixels
    seen = {
        name: set(films(task, name).unique().tolist()) - set(range(100)) for name in ("train", "validation")
    }
    seen["test"] = set(films(task, "test").unique().tolist()) - set(range(200))
    assert seen["train"] and seen["train"] <= set(range(100, 100 + N_IMAGES - N_VALIDATING))
    assert seen["validation"] and seen["validation"] <= set(range(114, 120))
    assert seen["test"] and seen["test"] <= set(range(200, 208))


def test_images_move_straight_and_turn_around_at_the_edges(folder):
    # the square of places is so large that rounding does not matter
    task = BouncingDigits(path=folder, length=60, **FEW | {"size": 100_003, "n_test": 50})
    places = task.split("test").places.double() / torch.tensor([100_003.0 - ROWS, 100_003 - COLUMNS])
    assert places.min() == 0 and places.max() == 1
    moves = places.diff(dim=1)
    # away from the edges each step is 0.1 long, and like the one before
    free = ((places[:, 1:-1] > 0.1) & (places[:, 1:-1] < 0.9)).all(-1)
    length = moves[:, 1:].norm(dim=-1)
    torch.testing.assert_close(length[free], torch.full_like(length[free], 0.1), rtol=0, atol=1e-4)
    torch.testing.assert_close(moves[:, 1:][free], moves[:, :-1][free], rtol=0, atol=1e-4)
    # from an edge the next step leads back, as far as the one before would have led beyond it
    before, after = moves[:, :-2], moves[:, 2:]
    for edge, sign in ((0, 1), (1, -1)):
        reached = (places[:, 2:-1] == edge) & (places[:, 1:-2] != edge)
        inner = reached & (places[:, :-3] != edge)
        assert inner.sum() > 50
        torch.testing.assert_close(after[inner], -before[inner], rtol=0, atol=1e-4)
        assert (sign * after[inner] > 0).all()
    first = places[:, 0].flatten(0, 1)
    assert ((first.mean(0) - 0.5).abs() < 4 * (1 / 12 / 100) ** 0.5).all()


def test_what_is_hidden_is_asked_for_and_what_is_shown_is_not(folder):
    task = BouncingDigits(path=folder, length=7, shown=3, **FEW)
    whole = everything(dataclasses.replace(task, shown=None).split("validation"))
    batch = everything(task.split("validation"))
    assert batch.inputs.shape == (10, 6, 101) and batch.targets.shape == (10, 6, 100)
    assert batch.inputs[0, :, -1].tolist() == [0, 0, 0, 1, 1, 1]
    assert torch.equal(batch.inputs[:, :3, :-1], whole.inputs[:, :3]) and not batch.inputs[:, 3:, :-1].any()
    # step 3 has the last frame that is shown, and is asked for the next
    assert batch.targets[:, :2].isnan().all() and torch.equal(batch.targets[:, 2:], whole.targets[:, 2:])
    assert torch.equal(whole.inputs[:, 1:], whole.targets[:, :-1]) and whole.targets.isfinite().all()


def test_smaller_frames_are_means_of_squares(folder):
    task = BouncingDigits(path=folder, shown=None, **FEW)
    large, small = (everything(t.split("test")).targets for t in (task, dataclasses.replace(task, shrink=5)))
    expected = large.reshape(12, 19, 2, 5, 2, 5).mean((3, 5)).flatten(2)
    torch.testing.assert_close(small, expected)


def test_films_depend_on_the_fields_alone_and_epochs_have_films_of_their_own(folder):
    np.random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    task, same = BouncingDigits(path=folder, **FEW), BouncingDigits(path=folder, **FEW | {"n_train": 40})
    assert torch.equal(films(task, "test"), films(same, "test"))
    assert not torch.equal(films(task, "test"), films(dataclasses.replace(task, seed=1), "test"))
    train = task.split("train")
    one, two = (train.of_epoch(seed=0, epoch=epoch) for epoch in (0, 1))
    assert not torch.equal(one.places, two.places) and not torch.equal(one.places, train.places)
    assert torch.equal(train.of_epoch(seed=0, epoch=1).places, two.places)
    assert torch.equal(one.of_epoch(seed=0, epoch=1).chosen, two.chosen)
    assert not torch.equal(train.of_epoch(seed=1, epoch=1).places, two.places)
    assert task.split("test").of_epoch(seed=0, epoch=1) is task.split("test")
    fixed = dataclasses.replace(task, fresh=False).split("train")
    assert fixed.of_epoch(seed=0, epoch=1) is fixed and torch.equal(fixed.places, train.places)
    assert torch.equal(torch.get_rng_state(), before[0]) and (np.random.get_state()[1] == before[1]).all()


def test_scores_are_of_the_frames_that_are_asked_for(folder):
    task: Task = BouncingDigits(path=folder, length=6, shown=2, **FEW)
    test: Source = task.split("test")
    assert isinstance(task, ScoredTask) and judged_by(task) == "mse" and task.vocab_size is None
    asked = everything(test).targets[:, 1:].double()
    predictions = torch.full((12, 5, 100), 0.1)
    scores = task.score(predictions, test)
    error = (asked - 0.1) ** 2
    assert scores["mse"] == pytest.approx(float(error.mean()), rel=1e-5)
    assert scores["mae"] == pytest.approx(float((asked - 0.1).abs().mean()), rel=1e-5)
    by_frame = [{"frame": 3 + k, "mse": pytest.approx(float(error[:, k].mean()), rel=1e-5)} for k in range(4)]
    assert scores["mse_by_frame"] == by_frame
    assert json.loads(json.dumps(scores)) == scores
    assert task.chance == pytest.approx(float((asked**2).mean()), rel=1e-6)
    learned = everything(task.split("train")).targets[:, 1:].double()
    expected = ((asked - learned.flatten(0, 1).mean(0)) ** 2).mean()
    assert task.trivial_score == pytest.approx(float(expected), rel=1e-6) and task.trivial_score < task.chance
    with pytest.raises(ValueError, match=r"\(12, 5, 100\); got \(3, 5, 100\)"):
        task.score(predictions[:3], test)


def test_a_probe_has_images_of_another_data_set_that_move_alike(data, tmp_path):
    other = make(tmp_path / "fashion-mnist", 2)["t10k"]
    task = BouncingDigits(path=data[0], other=tmp_path / "fashion-mnist", **FEW)
    assert isinstance(task, ProbedTask) and list(task.probes) == ["fashion-mnist"]
    probe = task.probes["fashion-mnist"]
    assert torch.equal(probe.places, task.split("test").places)
    assert (probe.images.numpy() == other).all() and not torch.equal(probe.images, task.split("test").images)
    assert not BouncingDigits(path=data[0], **FEW).probes


def test_folders_and_fields_that_cannot_be_used_are_refused(folder, tmp_path):
    with pytest.raises(
        DataError, match=r"got None. It must be a folder with the four files of MNIST.*--data.path"
    ):
        BouncingDigits().prepared()
    with pytest.raises(DataError, match="has neither train-images-idx3-ubyte nor"):
        BouncingDigits(path=tmp_path).prepared()
    with pytest.raises(
        DataError, match=r"`n_validation_images` must be less than the 20 training .*; got 20"
    ):
        BouncingDigits(path=folder, n_validation_images=20).prepared()
    with pytest.raises(DataError, match="frames of `size` = 3 rows and columns; they have 4 x 3"):
        BouncingDigits(path=folder, **FEW | {"size": 3}).prepared()
    # known before a model is trained
    with pytest.raises(DataError, match=r"gone.* does not exist"):
        BouncingDigits(path=folder, other=tmp_path / "gone", **FEW).prepared()
    for side, other in ((3, "small"), (11, "large")):
        make(tmp_path / other, 2, shape=(side, 2))
    BouncingDigits(path=folder, other=tmp_path / "small", **FEW).prepared()
    with pytest.raises(DataError, match=r"images of .*large must fit .* = 10 rows and columns; .* 11 x 2"):
        BouncingDigits(path=folder, other=tmp_path / "large", **FEW).prepared()
    for shown in (0, 20):
        with pytest.raises(
            ValueError, match=f"`shown` must be from 1 to `length` - 1 = 19, or None; got {shown}"
        ):
            BouncingDigits(shown=shown)
    with pytest.raises(ValueError, match="`shrink` must divide `size` = 64; got 3"):
        BouncingDigits(shrink=3)
    with pytest.raises(ValueError, match="`n_digits` must be at least 1; got 0"):
        BouncingDigits(n_digits=0)


def test_the_recipe_trains_and_survives_json(folder, tmp_path):
    recipe = get_recipe("bouncing-digits")
    assert config_from_dict(json.loads(json.dumps(config_to_dict(recipe)))) == recipe
    assert not recipe.model.bidirectional and recipe.model.n_outputs == 64 * 64
    task = BouncingDigits(path=folder, other=folder, length=5, shown=2, **FEW)
    model = dataclasses.replace(recipe.model, d_model=4, n_layers=1, d_channel_mixing=4)
    config = TrainConfig("tiny", task, model, loop=LoopConfig(device="cpu", batch_size=10, steps=5))
    assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config
    result = fit(config, tmp_path / "run")
    assert result.test["mse"] == pytest.approx(result.test["loss"], rel=1e-5)
    assert math.isfinite(result.test["loss"]) and result.probes.keys() == {"mnist"}
