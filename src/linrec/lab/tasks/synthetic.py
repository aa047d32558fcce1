"""Base classes of generated tasks: splits, new samples per epoch, probes, and scores.

Every split has its own random generator. A longer training split does not change the other splits, and the
data do not depend on the order in which splits are read. Splits have no samples in common: test samples are
drawn first, then validation samples, and repeated samples are drawn again. Two draws from a continuous
distribution are never equal, so tasks of real numbers compare no samples.
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
from jaxtyping import Float, Int64
from numpy.typing import NDArray
from torch import Tensor

from linrec.errors import unknown
from linrec.lab.tasks.base import (
    NO_TARGET,
    SPLIT_NAMES,
    ObjectiveName,
    Split,
    SplitName,
    compared,
    errors_of_numbers,
)
from linrec.lab.tasks.drawing import draw_distinct, fingerprints, split_generator
from linrec.lab.tasks.fields import CheckedTask


class Drawn(NamedTuple):
    """Generated samples of equal length, as NumPy arrays.

    Args:
        inputs: tokens, shape (n, t), int64; or features, (n, t, f), float32.
        targets: class at every position, shape (n, t), int64, -100 without a target; for a regression, real
            numbers, (n, t, f) or (n, f), float32, NaN without a target.
        group: group of every position for scores by group, shape (n, t), int64, such as a number of pairs or
            a distance; the task's `group_name` is its name. None for a task without groups.
    """

    inputs: NDArray[np.int64] | NDArray[np.float32]
    targets: NDArray[np.int64] | NDArray[np.float32]
    group: NDArray[np.int64] | None = None

    @classmethod
    def ending(cls, inputs: NDArray[np.int64], answers: NDArray[np.int64]) -> "Drawn":
        """Return samples whose targets are the answers (n, m) at the last m steps."""
        targets = np.full_like(inputs, NO_TARGET)
        targets[:, -answers.shape[1] :] = answers
        return cls(inputs, targets)

    def where(self, chosen: NDArray[np.bool_]) -> "Drawn":
        """Return the chosen samples."""
        group = None if self.group is None else self.group[chosen]
        return Drawn(self.inputs[chosen], self.targets[chosen], group)


@dataclass(frozen=True, kw_only=True)
class DrawnTask(CheckedTask, abc.ABC):
    """Base class of tasks with generated samples; a subclass defines `draw`, and its own checks in `check`.

    Args:
        length: length of a sample: the number of steps, unless the task defines it otherwise.
        n_train: number of training samples, per epoch if `fresh`.
        n_validation: number of validation samples.
        n_test: number of test samples, and of samples in every probe.
        fresh: whether every epoch draws new training samples; if not, all epochs share the same samples.
        test_lengths: lengths of additional test sets; see `probes`.
        seed: seed of the data only.

    Raises:
        ValueError: a field is out of range, or there are too few distinct samples.
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
    """Whether samples are real numbers, which never repeat and need no comparison with other samples."""
    least: ClassVar[Mapping[str, int]] = {"n_train": 1, "n_validation": 1, "n_test": 1, "seed": 0}

    def __post_init__(self) -> None:
        super().__post_init__()
        for length in self.test_lengths:
            self.at_length(length)

    @property
    def unit(self) -> float | None:
        """Length of a regular step, if batches have `dt` from the last feature; None for no `dt`."""
        return None

    @abc.abstractmethod
    def draw(self, random: np.random.Generator, n: int) -> Drawn:
        """Draw n samples, a pure function of the fields and the random generator."""

    def draw_held_out(self, random: np.random.Generator, n: int) -> Drawn:
        """Draw n samples for validation or testing; by default, `draw`.

        A task overrides this method if some kinds of samples are so few that none would be left for training.
        """
        return self.draw(random, n)

    def for_training(self, drawn: Drawn) -> Drawn:
        """Return samples with the training targets; by default, unchanged."""
        return drawn

    def at_length(self, length: int) -> "DrawnTask":
        """Return the task with another `length`, without probes."""
        return dataclasses.replace(self, length=length, test_lengths=())

    def split(self, name: SplitName) -> Split:
        """Return the samples of a split: "train", "validation" or "test".

        Raises:
            ValueError: the split does not exist, or there are too few distinct samples.
        """
        # splits are drawn on demand, because a probe of long sequences only needs its test split
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
        """Additional test samples for each length in `test_lengths`, by the length as a string."""
        return {str(length): self.at_length(length).split("test") for length in self.test_lengths}

    @cached_property
    def _test(self) -> Split:
        return self._split_of(self._drawn("test", self.n_test, frozenset()))

    @cached_property
    def _validation(self) -> Split:
        return self._split_of(self._drawn("validation", self.n_validation, self._taken_by("test")))

    @cached_property
    def _training(self) -> Split:
        return self._train(self._taken_by("test", "validation"), epoch=None, seed=0)

    def _taken_by(self, *names: SplitName) -> frozenset[int]:
        if self.continuous:
            return frozenset()
        splits = [self.split(name).inputs.numpy() for name in names]
        return frozenset(number for split in splits for number in fingerprints(split).tolist())

    def _drawn(self, name: SplitName, n: int, taken: frozenset[int], *more: int) -> Drawn:
        """Draw n samples of a split that are not `taken`; validation and test samples are also distinct."""
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

    def _split_of(self, drawn: Drawn) -> Split:
        group = None if drawn.group is None else torch.from_numpy(drawn.group)
        return Split(torch.from_numpy(drawn.inputs), torch.from_numpy(drawn.targets), group, self.unit)

    def _train(self, held_out: frozenset[int], *, epoch: int | None, seed: int) -> Split:
        more = () if epoch is None else (1 + epoch, seed)
        samples = self._split_of(self.for_training(self._drawn("train", self.n_train, held_out, *more)))
        if not self.fresh:
            return samples
        return dataclasses.replace(samples, redrawn=functools.partial(self._train, held_out))


class Alphabet(NamedTuple):
    """The sizes of a task's sets of tokens.

    Args:
        tokens: vocabulary size.
        classes: number of target classes.
        answers: number of classes among which a guess is uniform, for the chance level.
    """

    tokens: int
    classes: int
    answers: int


@dataclass(frozen=True, kw_only=True)
class SyntheticTask(DrawnTask):
    """Base class of generated token tasks, with targets at some or all steps; see `DrawnTask` for fields.

    A subclass defines `alphabet` and `draw`.
    """

    n_features: ClassVar[int | None] = None
    per_sequence: ClassVar[bool] = False
    objective: ClassVar[ObjectiveName] = "classification"
    group_name: ClassVar[str] = ""
    """Name of the quantity in `Drawn.group`, such as "pairs"; empty for a task without groups."""

    @property
    def alphabet(self) -> Alphabet:
        """The numbers of tokens, of target classes, and of possible answers."""
        raise NotImplementedError(f"{type(self).__name__} must define `alphabet`.")

    @property
    def vocab_size(self) -> int:
        """Vocabulary size."""
        return self.alphabet.tokens

    @property
    def n_outputs(self) -> int:
        """Number of target classes."""
        return self.alphabet.classes

    @property
    def chance(self) -> float:
        """Expected accuracy of a uniform guess among the possible answers."""
        return 1 / self.alphabet.answers

    @cached_property
    def trivial_score(self) -> float:
        """Test accuracy of always predicting the most frequent target of the training split."""
        targets = self.split("train").targets
        majority = torch.bincount(targets[targets != NO_TARGET]).argmax()
        wanted = self.split("test").targets
        return float((wanted[wanted != NO_TARGET] == majority).double().mean())

    def score(self, predictions: Int64[Tensor, "n t"], split: Split) -> dict[str, Any]:
        """Return scores of predictions on a split.

        Args:
            predictions: predicted classes, shape (n, t), any integer dtype, on any device.
            split: the split of the targets.

        Returns:
            "accuracy", the fraction of correct positions among all positions with a target; "exact", the
            fraction of samples with all targets correct; and for a task with groups "accuracy_by_GROUP", a
            list of {GROUP: number, "accuracy", "count"}.
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


@dataclass(frozen=True, kw_only=True)
class RegressionTask(DrawnTask):
    """Base class of generated tasks of real numbers; see `DrawnTask` for the fields.

    A subclass sets `per_sequence`: whether a sequence has a single target, or every step has a target.
    """

    vocab_size: ClassVar[int | None] = None
    objective: ClassVar[ObjectiveName] = "regression"
    continuous: ClassVar[bool] = True
    n_outputs: ClassVar[int] = 1
    """Real numbers per target."""

    @property
    def chance(self) -> float:
        """Mean squared error of a natural constant; by default of the training mean, as `trivial_score`."""
        return self.trivial_score

    @cached_property
    def trivial_score(self) -> float:
        """Mean squared error on the test split of always predicting the mean training target."""
        targets = self.split("train").targets.double()
        mean = targets.flatten(0, -2).nanmean(0)
        return float((self.split("test").targets.double() - mean).square().nanmean())

    def score(self, predictions: Float[Tensor, "n *t f"], split: Split) -> dict[str, Any]:
        """Return scores of predictions on a split.

            nrmse = sqrt(sum (prediction - target)^2 / sum (target - mean target)^2)

        Args:
            predictions: real numbers in the shape of the targets, on any device.
            split: the split of the targets.

        Returns:
            "mse", the mean squared error of all numbers that have a target, and "nrmse", which is 1 for the
            best constant, and None if all targets are equal.
        """
        errors = errors_of_numbers(predictions, split)
        return {name: errors[name] for name in ("mse", "nrmse")}


def require_longer_probes(task: DrawnTask) -> None:
    """Raise ValueError if a probe is not longer than the training strings, which it may repeat."""
    if any(length <= task.length for length in task.test_lengths):
        raise ValueError(
            f"`test_lengths` must be greater than `length` = {task.length}, the longest training string; got "
            f"{task.test_lengths}. The scores of the test split include shorter lengths."
        )
