"""BabyAI: follow an instruction in a grid world, learned from the demonstrations of a bot."""

import contextlib
import dataclasses
import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from linrec.errors import unknown
from linrec.extras import import_extra
from linrec.lab.tasks.base import (
    NO_TARGET,
    SPLIT_NAMES,
    Batch,
    ObjectiveName,
    SplitName,
    StoredSource,
    compared,
)
from linrec.lab.tasks.drawing import draw_distinct, fingerprints, split_generator
from linrec.lab.tasks.fields import CheckedTask
from linrec.lab.tasks.files import kept
from linrec.lab.tasks.synthetic import DrawnTask
from linrec.models import SequenceClassifier

__all__ = ["BabyAI", "Demonstrations"]

WORDS = (
    *("go", "to", "pick", "up", "open", "put", "next", "a", "the", "and", "then", "after", "you"),
    *("red", "green", "blue", "purple", "yellow", "grey", "ball", "box", "key", "door", "object"),
    *("in", "front", "of", "behind", "on", "your", "left", "right"),
)
# of minigrid's symbolic image: 7 x 7 cells with a kind, a colour and a state; the agent looks in 4 directions
CELLS, KINDS, COLOURS, STATES, DIRECTIONS = 49, 11, 6, 3, 4
ACTIONS = 7
N_FEATURES = len(WORDS) + CELLS * (KINDS + COLOURS + STATES) + DIRECTIONS
PURPOSE = "The task BabyAI"
ROUND = 1000


class Step(NamedTuple):
    """An observation as numbers: the cells (147), and the direction."""

    image: UInt8[np.ndarray, "147"]
    direction: int


@dataclass(frozen=True, eq=False)
class Demonstrations(StoredSource):
    """Demonstrations: the words of an instruction, then an observation for each action. A `Source`.

    Attributes:
        words: number of the word, from 1; 0 at an observation and after the end (n, t), uint8.
        images: cells of an observation (n, t, 147), uint8.
        directions: direction of the agent, from 1; 0 at a word and after the end (n, t), uint8.
        actions: actions of the bot; -100 where there is no observation (n, t), int64.
        seeds: seed of each episode (n), int64.
    """

    words: UInt8[Tensor, "n t"]
    images: UInt8[Tensor, "n t cells"]
    directions: UInt8[Tensor, "n t"]
    actions: Int64[Tensor, "n t"]
    seeds: Int64[Tensor, "n"]

    def __len__(self) -> int:
        return len(self.seeds)

    @property
    def flat(self) -> NDArray[Any]:
        """Everything but the seeds, (n, numbers)."""
        parts = (self.words, self.images, self.directions, self.actions)
        return torch.cat([part.flatten(1).to(torch.int8) for part in parts], 1).numpy()

    def rows(self, index: Int64[Tensor, "b"]) -> Batch:
        """Return demonstrations as a batch: inputs (b, t, f), float32, and targets (b, t), the actions."""
        parts = (part[index.to(part.device)] for part in (self.words, self.images, self.directions))
        return Batch(_features(*parts), self.actions[index.to(self.actions.device)], None)


@dataclass(frozen=True, kw_only=True)
class BabyAI(CheckedTask):
    """Imitate a bot that follows an instruction in a grid world.

        x = word_1, ..., word_l, o_1, ..., o_n        y = action_1, ..., action_n at the observations o

    An observation has the 7 x 7 cells that the agent sees, each with an object, a colour and a state, and the
    agent's direction, all as one-hot vectors. Objects that leave the view must be remembered. BabyAI's bot,
    which sees the whole world, makes the demonstrations. Needs the package minigrid, the extra "babyai".

    Args:
        level: a level of BabyAI, such as "GoToLocal", "PutNextLocal" or "BossLevel".
        length: number of steps of a sequence, words and observations; longer demonstrations are left out.
        n_train: number of training demonstrations.
        n_validation: number of validation demonstrations.
        n_test: number of test demonstrations.
        seed: seed of the data only.
        cache: folder for demonstrations; None is `linrec/tasks` in the user's cache folder.

    Raises:
        ValueError: a field is out of range, there is no such level, or too few demonstrations differ.
        MissingExtraError: minigrid is not installed, when demonstrations are made.

    Source: Chevalier-Boisvert and others (2019, arXiv:1810.08272), BabyAI; the levels and the bot of
    minigrid. The paper's models see each observation through convolutions.

    Example:
        >>> BabyAI().n_features, BabyAI().n_outputs
        (1016, 7)
    """

    level: str = "GoToLocal"
    length: int = 32
    n_train: int = 10_000
    n_validation: int = 500
    n_test: int = 500
    seed: int = 0
    cache: Path | None = None
    section: ClassVar[str] = "task"
    per_sequence: ClassVar[bool] = False
    objective: ClassVar[ObjectiveName] = "classification"
    n_features: ClassVar[int] = N_FEATURES
    vocab_size: ClassVar[int | None] = None
    n_outputs: ClassVar[int] = ACTIONS
    chance: ClassVar[float] = 1 / ACTIONS
    reset_token: ClassVar[int | None] = None
    least: ClassVar[Mapping[str, int]] = {**DrawnTask.least, "length": 4}

    @cached_property
    def trivial_score(self) -> float:
        """Test accuracy of always taking the most frequent action of the training demonstrations."""
        train, test = (self.split(name).actions for name in ("train", "test"))
        return float((test[test >= 0] == train[train >= 0].bincount().argmax()).double().mean())

    def prepared(self) -> "BabyAI":
        """Make the training demonstrations or load them from the cache, and return the task itself."""
        self.split("train")
        return self

    def split(self, name: SplitName) -> Demonstrations:
        """Return the demonstrations of a split: "train", "validation" or "test"."""
        if name not in SPLIT_NAMES:
            raise unknown("split", name, SPLIT_NAMES)
        if name not in self._found:
            # in this order, no split depends on the size of a later split
            others: tuple[SplitName, ...] = ("test", "validation", "train")
            before = [self.split(other) for other in others[: others.index(name)]]
            fields = {"level": self.level, "length": self.length, "seed": self.seed}
            sizes = {f"n_{other}": getattr(self, f"n_{other}") for other in others[: len(before) + 1]}
            about = {"task": "BabyAI", "minigrid": _version(), "split": name, "fields": fields | sizes}
            drawn = kept("babyai", about, lambda: self._drawn(name, before), cache=self.cache)
            self._found[name] = Demonstrations(**drawn)
        return self._found[name]

    def score(self, predictions: Int64[Tensor, "n t"], split: Demonstrations) -> dict[str, Any]:
        """Return "accuracy", the fraction of actions that are the bot's."""
        right, asked = compared(predictions, split.actions)
        return {"accuracy": float(right[asked].double().mean())}

    @torch.no_grad()
    def generated_scores(self, model: SequenceClassifier, split: Demonstrations) -> dict[str, Any]:
        """Return "success", the fraction of the split's episodes in which the model's actions reach the goal.

        The model takes its likeliest actions, at most as many as a sequence has steps. A model that sees
        later steps cannot act, and has no score.
        """
        if model.config.bidirectional:
            return {}
        device = next(model.parameters()).device
        worlds = [_make(self.level) for _ in range(len(split))]
        steps = [_step(_reset(world, seed)) for world, seed in zip(worlds, split.seeds.tolist(), strict=True)]
        # words end at the same step, the first observation is the next one
        n_words = (split.words > 0).sum(1)
        place = torch.arange(int(n_words.max())) - n_words.max() + n_words[:, None]
        words = split.words.take_along_dim(place.clamp(min=0), 1).masked_fill(place < 0, 0)
        nothing = split.images.new_zeros(*words.shape, 3 * CELLS)
        told = _features(words, nothing, words.new_zeros(words.shape))
        _, state = model.stream(told.to(device), reset=(place == 0).to(device))
        done, solved = np.zeros((2, len(worlds)), np.bool_)
        for _ in range(self.length):
            images = torch.from_numpy(np.stack([step.image for step in steps]))[:, None]
            directions = torch.tensor([[1 + step.direction] for step in steps], dtype=torch.uint8)
            seen = _features(torch.zeros_like(directions), images, directions)
            y, state = model.stream(seen.to(device), state)
            for n, action in enumerate(y[:, 0].argmax(-1).tolist()):
                if not done[n]:
                    observed, reward, ended, cut, _ = worlds[n].step(action)
                    steps[n], done[n], solved[n] = _step(observed), ended or cut, reward > 0
            if done.all():
                break
        return {"success": float(solved.mean())}

    @cached_property
    def _found(self) -> dict[SplitName, Demonstrations]:
        return {}

    def _drawn(self, name: SplitName, before: list[Demonstrations]) -> dict[str, Tensor]:
        """Return demonstrations that are in no other split."""
        random = split_generator("BabyAI", name, self.seed)
        world = _make(self.level)

        def draw(n: int) -> Demonstrations:
            found: list[Demonstrations] = []
            while len(found) < n:
                found += _demonstrated(world, int(random.integers(2**31)), self.length)
            return Demonstrations(*(torch.cat(parts) for parts in zip(*map(_parts, found), strict=True)))

        taken = {number for split in before for number in fingerprints(split.flat).tolist()}
        rounds = draw_distinct(
            draw,
            getattr(self, f"n_{name}"),
            rows=lambda drawn: drawn.flat,
            name=f"{name} of BabyAI",
            taken=taken,
            largest_round=ROUND,
        )
        chosen = [[part[torch.from_numpy(new)] for part in _parts(drawn)] for drawn, new in rounds]
        names = [field.name for field in dataclasses.fields(Demonstrations)]
        return dict(zip(names, (torch.cat(parts) for parts in zip(*chosen, strict=True)), strict=True))


def _parts(split: Demonstrations) -> tuple[Tensor, ...]:
    return split.words, split.images, split.directions, split.actions, split.seeds


def _make(level: str) -> Any:
    """Return the world of a level."""
    import_extra("minigrid", PURPOSE)
    gymnasium = import_extra("gymnasium", PURPOSE)
    known = [name for name in gymnasium.registry if name.startswith("BabyAI-")]
    if (name := f"BabyAI-{level}-v0") not in known:
        raise unknown("`level`", level, [name.removeprefix("BabyAI-").removesuffix("-v0") for name in known])
    return gymnasium.make(name)


def _version() -> str:
    """Return the version of minigrid, whose worlds may change."""
    return str(import_extra("minigrid", PURPOSE).__version__)


def _bot(world: Any) -> Any:
    """Return the bot of a world, which has been reset."""
    return import_extra("minigrid.utils.baby_ai_bot", PURPOSE).BabyAIBot(world)


def _reset(world: Any, seed: int) -> Any:
    # minigrid prints the layouts that it rejects
    with contextlib.redirect_stdout(io.StringIO()):
        return world.reset(seed=seed)[0]


def _step(observed: Any) -> Step:
    return Step(observed["image"].reshape(-1), int(observed["direction"]))


def _demonstrated(world: Any, seed: int, length: int) -> Iterator[Demonstrations]:
    """Yield the bot's demonstration of an episode, if it reaches the goal within the length."""
    observed = _reset(world, seed)
    spoken = re.findall("[a-z]+", observed["mission"])
    for word in spoken:
        if word not in WORDS:
            raise unknown(f"word of {observed['mission']!r}", word, WORDS)
    bot, reward, ended = _bot(world), 0.0, False
    steps: list[Step] = []
    actions: list[int] = []
    while not ended and len(spoken) + len(steps) < length:
        steps.append(_step(observed))
        actions.append(int(bot.replan()))
        observed, reward, stopped, cut, _ = world.step(actions[-1])
        ended = stopped or cut
    if not (ended and reward > 0):
        return
    words, directions = torch.zeros(2, 1, length, dtype=torch.uint8)
    images = torch.zeros(1, length, 3 * CELLS, dtype=torch.uint8)
    targets = torch.full((1, length), NO_TARGET)
    begin, end = len(spoken), len(spoken) + len(steps)
    words[0, :begin] = torch.tensor([1 + WORDS.index(word) for word in spoken])
    images[0, begin:end] = torch.from_numpy(np.stack([step.image for step in steps]))
    directions[0, begin:end] = torch.tensor([1 + step.direction for step in steps])
    targets[0, begin:end] = torch.tensor(actions)
    yield Demonstrations(words, images, directions, targets, torch.tensor([seed]))


def _features(words: Tensor, images: Tensor, directions: Tensor) -> Float[Tensor, "b t f"]:
    """Return one-hot vectors; parts that a step lacks are zeros."""
    cells = images.long().unflatten(-1, (CELLS, 3)).unbind(-1)
    kinds = [_one_hot(part, n).flatten(-2) for part, n in zip(cells, (KINDS, COLOURS, STATES), strict=True)]
    seen = torch.cat(kinds, -1) * (directions > 0)[..., None]
    # the first class stands for nothing
    told, ahead = (
        _one_hot(x.long(), n + 1)[..., 1:] for x, n in ((words, len(WORDS)), (directions, DIRECTIONS))
    )
    return torch.cat([told, seen, ahead], -1)


def _one_hot(x: Tensor, n: int) -> Tensor:
    return functional.one_hot(x, n).float()
