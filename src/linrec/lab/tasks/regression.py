"""Base class of generated tasks with real-valued inputs and targets.

Two draws from a continuous distribution are never equal. Splits have no samples in common because each split
has its own random generator.
"""

import abc
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor

from linrec.lab.tasks.base import ObjectiveName, Split, errors_of_numbers
from linrec.lab.tasks.synthetic import DrawnTask


@dataclass(frozen=True, kw_only=True)
class RegressionTask(DrawnTask):
    """Base class of generated tasks of real numbers; see `DrawnTask` for the fields.

    A subclass sets `per_sequence`: whether a sequence has a single target, or every step has a target.
    """

    vocab_size: ClassVar[int | None] = None
    objective: ClassVar[ObjectiveName] = "regression"
    continuous: ClassVar[bool] = True

    @property
    @abc.abstractmethod
    def n_outputs(self) -> int:
        """Real numbers per target."""

    @property
    @abc.abstractmethod
    def chance(self) -> float:
        """Mean squared error of a natural constant prediction of the task."""

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

        Raises:
            ValueError: `predictions` has another shape than the targets.
            TypeError: `predictions` is not a real-valued tensor.
        """
        errors = errors_of_numbers(predictions, split)
        return {name: errors[name] for name in ("mse", "nrmse")}
