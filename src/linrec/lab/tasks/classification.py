"""Base class of sequence classification tasks: chance level, majority baseline and scores."""

import abc
from functools import cached_property
from typing import Any, ClassVar, Protocol

import torch
from jaxtyping import Int64
from torch import Tensor

from linrec.lab.tasks.base import ObjectiveName, Source, SplitName, scores_by_class


class LabelledSource(Source, Protocol):
    """A split with a class per sequence."""

    @property
    def labels(self) -> Int64[Tensor, "n"]:
        """Class of each sequence."""
        ...


class ClassificationTask(abc.ABC):
    """Base class of tasks with a class per sequence."""

    per_sequence: ClassVar[bool] = True
    objective: ClassVar[ObjectiveName] = "classification"

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int | None:
        """Vocabulary size; None for real-valued inputs."""

    @property
    def n_features(self) -> int | None:
        """Number of input features per step; None for tokens."""
        return None

    @property
    @abc.abstractmethod
    def n_outputs(self) -> int:
        """Number of target classes."""

    @abc.abstractmethod
    def split(self, name: SplitName) -> LabelledSource:
        """Return the sequences of a split: "train", "validation" or "test"."""

    @property
    def chance(self) -> float:
        """Expected accuracy of a uniform guess."""
        return 1 / self.n_outputs

    @cached_property
    def trivial_score(self) -> float:
        """Test accuracy of always predicting the most frequent class of the training split."""
        majority = torch.bincount(self.split("train").labels).argmax()
        return float((self.split("test").labels == majority).double().mean())

    @property
    def reset_token(self) -> None:
        """Always None: these tasks have no reset token."""
        return None

    def score(self, predictions: Int64[Tensor, "n"], split: LabelledSource) -> dict[str, Any]:
        """Return the accuracy of predictions on a split.

        Args:
            predictions: predicted classes, shape (n), any integer dtype, on any device.
            split: the split of the labels.

        Returns:
            JSON values: "accuracy", the fraction of correct predictions, and "accuracy_by_class", the
            accuracy within each class, None for classes without samples.

        Raises:
            ValueError: `predictions` has another shape than the labels.
            TypeError: `predictions` are not integers (pass classes, not logits).
        """
        return scores_by_class(predictions, split.labels, self.n_outputs)
