"""Tasks whose samples a generator draws, with real numbers as inputs and as targets.

No two draws from a continuum are alike, so that the splits share no sample by having generators of their own.
"""

import abc
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor

from linrec.tasks.base import ObjectiveName, Split, errors_of_numbers
from linrec.tasks.synthetic import DrawnTask


@dataclass(frozen=True, kw_only=True)
class RegressionTask(DrawnTask):
    """Base class of drawn tasks of real numbers; fields as in `DrawnTask`.

    Whether a sequence has one target or each step its own, `per_sequence` of a task says.
    """

    vocab_size: ClassVar[int | None] = None
    objective: ClassVar[ObjectiveName] = "regression"
    continuous: ClassVar[bool] = True

    @property
    @abc.abstractmethod
    def n_outputs(self) -> int:
        """Real numbers in a target."""

    @property
    @abc.abstractmethod
    def chance(self) -> float:
        """Mean squared error of the constant that the task's definition suggests."""

    @cached_property
    def trivial_score(self) -> float:
        """Mean squared error on the test split of always answering the mean target of the training split."""
        targets = self.split("train").targets.double()
        mean = targets.flatten(0, -2).nanmean(0)
        return float((self.split("test").targets.double() - mean).square().nanmean())

    def score(self, predictions: Float[Tensor, "n *t f"], split: Split) -> dict[str, Any]:
        """Compare predictions with the targets of a split.

            nrmse = sqrt(sum (prediction - target)^2 / sum (target - mean target)^2)

        Args:
            predictions: real numbers of the shape of the targets, on any device.
            split: what was predicted.

        Returns:
            "mse", the mean squared error of all numbers that have a target, and "nrmse", of which 1 is that
            of the constant that suits the split best; None where all its targets are equal.

        Raises:
            ValueError: `predictions` has another shape than the targets.
            TypeError: `predictions` are no real numbers.
        """
        errors = errors_of_numbers(predictions, split)
        return {name: errors[name] for name in ("mse", "nrmse")}
