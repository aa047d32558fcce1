"""Tasks whose sequences have one class each: chance and majority levels, and scores."""

import abc
from functools import cached_property
from typing import Any, ClassVar, Protocol

import torch
from jaxtyping import Int64
from torch import Tensor

from linrec.tasks.base import ObjectiveName, Source, SplitName, scores_by_class


class LabelledSource(Source, Protocol):
    """A split whose sequences have one class each."""

    @property
    def labels(self) -> Int64[Tensor, "n"]:
        """Class of each sequence."""
        ...


class ClassificationTask(abc.ABC):
    """Base class of tasks whose sequences have one class each."""

    per_sequence: ClassVar[bool] = True
    objective: ClassVar[ObjectiveName] = "classification"

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int | None:
        """Number of input tokens; None where a split gives them as real numbers."""

    @property
    def n_features(self) -> int | None:
        """Real numbers per step; None where steps are tokens."""
        return None

    @property
    @abc.abstractmethod
    def n_outputs(self) -> int:
        """Number of target classes."""

    @abc.abstractmethod
    def split(self, name: SplitName) -> LabelledSource:
        """Return the sequences of one split: "train", "validation" or "test"."""

    @property
    def chance(self) -> float:
        """Expected accuracy of a uniform guess."""
        return 1 / self.n_outputs

    @cached_property
    def trivial_score(self) -> float:
        """Test accuracy of always answering the most frequent class of the training split."""
        majority = torch.bincount(self.split("train").labels).argmax()
        return float((self.split("test").labels == majority).double().mean())

    @property
    def reset_token(self) -> None:
        """There is none: a sequence is read as a whole."""
        return None

    def score(self, predictions: Int64[Tensor, "n"], split: LabelledSource) -> dict[str, Any]:
        """Compare predictions with the labels of a split.

        Args:
            predictions: predicted classes, shape (n), any integer dtype, on any device.
            split: what was predicted.

        Returns:
            A dictionary that JSON can hold: "accuracy", the share of right predictions, and
            "accuracy_by_class", that of each class, None where the split has no sample of it.

        Raises:
            ValueError: `predictions` has another shape than the labels.
            TypeError: `predictions` are not integers (pass classes, not logits).
        """
        return scores_by_class(predictions, split.labels, self.n_outputs)
