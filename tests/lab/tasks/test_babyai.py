"""BabyAI on a corridor with the interface of minigrid, and on minigrid itself where it is installed."""

import dataclasses
import importlib.util
import json

import numpy as np
import pytest
import torch

from linrec.errors import MissingExtraError
from linrec.lab.tasks import ScoredTask, Task, babyai, judged_by
from linrec.lab.tasks.babyai import WORDS, BabyAI
from linrec.lab.train import fit, get_recipe
from linrec.lab.train.config import config_from_dict, config_to_dict
from linrec.models import SequenceClassifier
from linrec.testing import assert_agree
from tests.tiers import thorough

INSTALLED = importlib.util.find_spec("minigrid") is not None
TASK = {"n_train": 20, "n_validation": 5, "n_test": 8, "length": 14}
FORWARD, LEFT = 2, 0


class Corridor:
    """A ball lies `left` cells ahead, which the view shows; in every second world the agent first turns."""

    def reset(self, *, seed):
        random = np.random.default_rng(seed)
        self.left, self.turned = int(random.integers(1, 7)), bool(random.integers(2))
        # what else is seen, so that worlds differ
        self.view = random.integers(0, 3, (7, 7, 3)).astype(np.uint8)
        return self.observed(), {}

    def observed(self):
        image = self.view.copy()
        image[3, 6 - self.left] = (6, 0, 0)
        return {"image": image, "direction": 3 if self.turned else 0, "mission": "go to the red ball"}

    def step(self, action):
        if action == LEFT:
            self.turned = False
        if action == FORWARD and not self.turned:
            self.left -= 1
        reached = self.left == 0
        return self.observed(), float(reached), reached, False, {}


class Bot:
    def __init__(self, world):
        self.world = world

    def replan(self):
        return LEFT if self.world.turned else FORWARD


@pytest.fixture
def corridor(monkeypatch, tmp_path):
    monkeypatch.setattr(babyai, "_make", lambda level: Corridor())
    monkeypatch.setattr(babyai, "_bot", Bot)
    monkeypatch.setattr(babyai, "_version", lambda: "corridor")
    return BabyAI(**TASK, cache=tmp_path)


def test_a_sequence_is_the_instruction_then_what_the_agent_sees(corridor):
    split = corridor.split("train")
    batch = split.rows(torch.arange(len(split)))
    assert batch.inputs.shape == (20, 14, corridor.n_features)
    for row, seed in enumerate(split.seeds.tolist()):
        world = Corridor()
        observed, _ = world.reset(seed=seed)
        told = batch.inputs[row, :5]
        assert [WORDS[n] for n in told[:, : len(WORDS)].argmax(-1)] == observed["mission"].split()
        assert (told.sum(-1) == 1).all() and (batch.targets[row, :5] == -100).all()
        n = 5
        while world.left:
            image = torch.from_numpy(observed["image"].reshape(49, 3)).long()
            one_hot = [
                torch.nn.functional.one_hot(image[:, i], n).flatten() for i, n in enumerate((11, 6, 3))
            ]
            ahead = torch.nn.functional.one_hot(torch.tensor(observed["direction"]), 4)
            expected = torch.cat([torch.zeros(len(WORDS)), *one_hot, ahead])
            assert torch.equal(batch.inputs[row, n], expected)
            action = Bot(world).replan()
            assert batch.targets[row, n] == action
            observed, n = world.step(action)[0], n + 1
        assert not batch.inputs[row, n:].any() and (batch.targets[row, n:] == -100).all()


def test_splits_are_distinct_and_kept(corridor):
    task: Task = corridor
    assert isinstance(task, ScoredTask) and judged_by(task) == "accuracy"
    sizes = [len(task.split(name)) for name in ("train", "validation", "test")]
    assert sizes == [20, 5, 8]
    flat = np.concatenate([task.split(name).flat for name in ("train", "validation", "test")])
    assert len(np.unique(flat, axis=0)) == 33
    again = BabyAI(**TASK, cache=corridor.cache).split("test")
    assert_agree(again.rows(torch.arange(8)), task.split("test").rows(torch.arange(8)))
    other = BabyAI(**TASK, cache=corridor.cache, seed=1).split("test")
    assert not torch.equal(other.seeds, again.seeds)
    test = task.split("test")
    assert task.score(test.actions, test) == {"accuracy": 1.0}
    wrong = torch.where(test.actions == FORWARD, LEFT, test.actions)
    share = (test.actions == LEFT).sum() / (test.actions >= 0).sum()
    assert task.score(wrong, test)["accuracy"] == pytest.approx(share.item())
    assert task.trivial_score == pytest.approx(1 - share.item())


def test_longer_demonstrations_are_left_out(corridor):
    short = dataclasses.replace(corridor, length=9)
    assert (short.split("train").actions >= 0).sum(1).max() == 4


def trained(corridor, folder, steps):
    recipe = get_recipe("babyai")
    assert config_from_dict(json.loads(json.dumps(config_to_dict(recipe)))) == recipe
    model = dataclasses.replace(recipe.model, d_model=16, d_channel_mixing=16, n_layers=1)
    loop = dataclasses.replace(recipe.loop, device="cpu", batch_size=20, steps=steps, eval_every=steps)
    optim = dataclasses.replace(recipe.optim, lr=0.01, warmup_steps=1)
    return fit(dataclasses.replace(recipe, task=corridor, model=model, optim=optim, loop=loop), folder)


def test_a_trained_model_reaches_the_goal(corridor, tmp_path):
    result = trained(dataclasses.replace(corridor, n_train=60), tmp_path / "run", 60)
    assert result.test["accuracy"] > 0.95 and result.test["success"] == 1


def test_success_is_counted_in_the_world(corridor):
    config = get_recipe("babyai").model
    model = SequenceClassifier(
        dataclasses.replace(config, n_features=corridor.n_features, n_outputs=7, d_model=4, n_layers=1)
    ).eval()
    split = corridor.split("test")
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter.zero_()
        model.head.bias[FORWARD] = 1
    straight = [not _turned(seed) for seed in split.seeds.tolist()]
    assert corridor.generated_scores(model, split) == {"success": pytest.approx(np.mean(straight))}
    both = SequenceClassifier(dataclasses.replace(model.config, bidirectional=True))
    assert corridor.generated_scores(both, split) == {}


def _turned(seed):
    world = Corridor()
    world.reset(seed=seed)
    return world.turned


def test_unknown_words_and_sizes_are_refused(corridor, monkeypatch):
    monkeypatch.setattr(Corridor, "observed", lambda self: {**_seen(self), "mission": "go to the red balll"})
    with pytest.raises(ValueError, match="'balll'; did you mean 'ball'"):
        dataclasses.replace(corridor, cache=corridor.cache / "other").split("test")
    with pytest.raises(ValueError, match="`length` must be at least 4; got 3"):
        BabyAI(length=3)


_seen = Corridor.observed


@pytest.mark.skipif(INSTALLED, reason="minigrid is installed")
def test_a_missing_package_names_the_extra():
    with pytest.raises(MissingExtraError, match=r"The task BabyAI needs .*pip install 'linrec\[babyai\]'"):
        BabyAI().split("test")


@thorough
@pytest.mark.skipif(not INSTALLED, reason="needs minigrid")
def test_the_worlds_of_minigrid(tmp_path):
    task = BabyAI(level="PutNextLocal", n_train=8, n_validation=2, n_test=3, length=48, cache=tmp_path)
    split = task.split("test")
    for seed, words, actions in zip(split.seeds.tolist(), split.words, split.actions, strict=True):
        world = babyai._make("PutNextLocal")
        mission = babyai._reset(world, seed)["mission"]
        assert " ".join(WORDS[n - 1] for n in words[words > 0]) == mission.replace(",", "")
        rewards = [world.step(action)[1] for action in actions[actions >= 0].tolist()]
        assert rewards[-1] > 0 and not any(rewards[:-1])
    with pytest.raises(ValueError, match="`level` 'PutNextLokal'; did you mean 'PutNextLocal'"):
        BabyAI(level="PutNextLokal", cache=tmp_path).split("test")
