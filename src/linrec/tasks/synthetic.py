"""Tasks whose samples a generator draws: splits, fresh epochs, probes, and scores of tokens.

Every split has its own generator. A longer training split does not change the other splits, and the data does
not depend on the order in which splits are read. The splits share no sample: test samples are drawn first,
then validation samples, and a sample that was drawn before is drawn again. Tasks of real numbers, whose
samples always differ, are in `regression.py`.
"""

import abc
import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Int64
from numpy.typing import NDArray
from torch import Tensor

from linrec.errors import unknown
from linrec.tasks.base import (
    NO_TARGET,
    SPLIT_NAMES,
    ObjectiveName,
    Split,
    SplitName,
    compared,
    require_at_least,
)
from linrec.tasks.distinct import draw_distinct, fingerprints, split_generator


class Drawn(NamedTuple):
    """Samples as a generator gives them, all of one length.

    Args:
        inputs: tokens, shape (n, t), int64; or features, (n, t, f), float32.
        targets: class at every position, shape (n, t), int64; -100 where nothing is to be predicted. Of a
            regression real numbers, (n, t, f) or (n, f), float32; NaN where nothing is.
        group: what the score distinguishes at every position, shape (n, t), int64: number of pairs, distance
            or the like, as the task's `group_name` says; None where there is nothing.
    """

    inputs: NDArray[np.int64] | NDArray[np.float32]
    targets: NDArray[np.int64] | NDArray[np.float32]
    group: NDArray[np.int64] | None = None

    def where(self, chosen: NDArray[np.bool_]) -> "Drawn":
        """Return the chosen samples."""
        group = None if self.group is None else self.group[chosen]
        return Drawn(self.inputs[chosen], self.targets[chosen], group)


@dataclass(frozen=True, kw_only=True)
class DrawnTask(abc.ABC):
    """Base class of tasks whose samples a generator draws; a subclass defines `draw`.

    Args:
        length: what decides how long a sample is: its steps, where a task does not say otherwise.
        n_train: samples of the training split, or of an epoch.
        n_validation: samples of the validation split.
        n_test: samples of the test split, and of every probe.
        fresh: whether every epoch draws training samples of its own; else they are the same again.
        test_lengths: lengths to probe besides, see `probes`.
        seed: seed of the data alone.

    Raises:
        ValueError: a field is out of range, or there are fewer different samples than asked for.
    """

    length: int
    n_train: int = 10_000
    n_validation: int = 1_000
    n_test: int = 1_000
    fresh: bool = False
    test_lengths: tuple[int, ...] = ()
    seed: int = 0
    section: ClassVar[str] = "task"
    reset_token: ClassVar[int | None] = None
    continuous: ClassVar[bool] = False
    """Whether samples are real numbers, so that no two are alike and none has to be compared with others."""

    def __post_init__(self) -> None:
        require_at_least(self, n_train=1, n_validation=1, n_test=1, seed=0)
        for length in self.test_lengths:
            self.at_length(length)

    @abc.abstractmethod
    def draw(self, random: np.random.Generator, n: int) -> Drawn:
        """Draw n samples; a pure function of the fields and the generator."""

    def draw_held_out(self, random: np.random.Generator, n: int) -> Drawn:
        """Draw n samples that validate or test: as `draw`, where a task does not say otherwise.

        A task says so where some samples are so few that training would have none of them left.
        """
        return self.draw(random, n)

    def for_training(self, drawn: Drawn) -> Drawn:
        """Return samples as the training split has them: as they are, or with further targets."""
        return drawn

    def at_length(self, length: int) -> "DrawnTask":
        """Return the same task with longer or shorter sequences.

        Args:
            length: what the field `length` becomes.
        """
        return dataclasses.replace(self, length=length, test_lengths=())

    def prepared(self) -> "DrawnTask":
        """Return the task itself: its configuration says all."""
        return self

    def split(self, name: SplitName) -> Split:
        """Return the samples of one split.

        Args:
            name: "train", "validation" or "test".

        Returns:
            Inputs and targets, each of shape (samples, t).

        Raises:
            ValueError: there is no such split, or there are too few different samples.
        """
        # each when it is asked for: a probe of long sequences is its test split alone
        match name:
            case "test":
                return self._test
            case "validation":
                return self._validation
            case "train":
                return self._training
        raise unknown("split", name, SPLIT_NAMES)

    @cached_property
    def probes(self) -> Mapping[str, Split]:
        """Further test samples, by name: those of `test_lengths`, each under its length."""
        return {str(length): self.at_length(length).split("test") for length in self.test_lengths}

    @cached_property
    def _test(self) -> Split:
        return _split_of(self._drawn("test", self.n_test, frozenset()))

    @cached_property
    def _validation(self) -> Split:
        return _split_of(self._drawn("validation", self.n_validation, self._taken_by("test")))

    @cached_property
    def _training(self) -> Split:
        return self._train(self._taken_by("test", "validation"), epoch=None, seed=0)

    def _taken_by(self, *names: SplitName) -> frozenset[int]:
        if self.continuous:
            return frozenset()
        splits = [self.split(name).inputs.numpy() for name in names]
        return frozenset(number for split in splits for number in fingerprints(split).tolist())

    def _drawn(self, name: SplitName, n: int, taken: frozenset[int], *more: int) -> Drawn:
        """Draw n samples of a split that are not `taken`; samples that validate or test are distinct too."""
        random = split_generator(type(self).__name__, name, self.seed, *more)
        draw = self.draw if name == "train" else self.draw_held_out
        if self.continuous:
            return draw(random, n)
        rounds = draw_distinct(
            functools.partial(draw, random),
            n,
            rows=lambda drawn: drawn.inputs,
            name=f"the split {name!r} of {type(self).__name__}",
            taken=taken,
            repeats=name == "train",
        )
        found = [drawn.where(new) for drawn, new in rounds]
        groups = [drawn.group for drawn in found if drawn.group is not None]
        return Drawn(
            np.concatenate([drawn.inputs for drawn in found]),
            np.concatenate([drawn.targets for drawn in found]),
            np.concatenate(groups) if groups else None,
        )

    def _train(self, held_out: frozenset[int], *, epoch: int | None, seed: int) -> Split:
        more = () if epoch is None else (1 + epoch, seed)
        samples = _split_of(self.for_training(self._drawn("train", self.n_train, held_out, *more)))
        if not self.fresh:
            return samples
        return dataclasses.replace(samples, redrawn=functools.partial(self._train, held_out))


@dataclass(frozen=True, kw_only=True)
class SyntheticTask(DrawnTask):
    """Base class of drawn tasks of tokens, with targets at some or all steps; fields as in `DrawnTask`."""

    n_features: ClassVar[int | None] = None
    per_sequence: ClassVar[bool] = False
    objective: ClassVar[ObjectiveName] = "classification"
    group_name: ClassVar[str] = ""
    """What `Drawn.group` counts, such as "pairs"; empty where a task has no groups."""

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """Number of input tokens."""

    @property
    @abc.abstractmethod
    def n_outputs(self) -> int:
        """Number of target classes."""

    @property
    @abc.abstractmethod
    def chance(self) -> float:
        """Expected accuracy of a uniform guess among the classes that occur."""

    @cached_property
    def trivial_score(self) -> float:
        """Test accuracy of always answering the most frequent target of the training split."""
        targets = self.split("train").targets
        majority = torch.bincount(targets[targets != NO_TARGET]).argmax()
        wanted = self.split("test").targets
        return float((wanted[wanted != NO_TARGET] == majority).double().mean())

    def score(self, predictions: Int64[Tensor, "n t"], split: Split) -> dict[str, Any]:
        """Compare predictions with the targets of a split.

        Args:
            predictions: predicted classes, shape (n, t), any integer dtype, on any device.
            split: what was predicted.

        Returns:
            "accuracy", the share of right positions among those with a target; "exact", the share of samples
            that are right at all of them; and, of a task with groups, "accuracy_by_GROUP": a list of
            {GROUP: number, "accuracy", "count"}.

        Raises:
            ValueError: `predictions` has another shape than the targets.
            TypeError: `predictions` are not integers (pass classes, not logits).
        """
        right, counted = compared(predictions, split.targets)
        scores: dict[str, Any] = {
            "accuracy": float(right[counted].double().mean()),
            "exact": float((right | ~counted).all(1).double().mean()),
        }
        if split.group is not None:
            of = split.group[counted]
            scores[f"accuracy_by_{self.group_name}"] = [
                {
                    self.group_name: int(value),
                    "accuracy": float(right[counted][of == value].double().mean()),
                    "count": int((of == value).sum()),
                }
                for value in of.unique()
            ]
        return scores


def require_longer_probes(task: DrawnTask) -> None:
    """Refuse probes of a length that training has strings of: a probe is not kept apart from these.

    Raises:
        ValueError: one of `test_lengths` is not beyond `length`.
    """
    if any(length <= task.length for length in task.test_lengths):
        raise ValueError(
            f"`test_lengths` must be greater than `length` = {task.length}, that of the longest string "
            f"in training; got {task.test_lengths}. The score of the test split tells shorter ones apart."
        )


def _split_of(drawn: Drawn) -> Split:
    group = None if drawn.group is None else torch.from_numpy(drawn.group)
    return Split(torch.from_numpy(drawn.inputs), torch.from_numpy(drawn.targets), group)
