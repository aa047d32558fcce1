"""What every task offers: splits of token sequences, a score, and the scores that need no model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from jaxtyping import Int64
from torch import Tensor

SplitName = Literal["train", "validation", "test"]
SPLIT_NAMES: tuple[SplitName, ...] = get_args(SplitName)
NO_TARGET = -100


@dataclass(frozen=True, eq=False)
class Split:
    """The samples of one split, whole and in memory.

    Attributes:
        inputs: input tokens, shape (n, t), int64.
        targets: target class at every position, shape (n, t), int64; -100 where nothing is to be predicted.
        span: how many of the latest inputs the target depends on, shape (n, t), int64.
    """

    inputs: Int64[Tensor, "n t"]
    targets: Int64[Tensor, "n t"]
    span: Int64[Tensor, "n t"]

    def __len__(self) -> int:
        return self.inputs.shape[0]


class Task(Protocol):
    """The interface that training and reports rely on; a task is a frozen dataclass that has it.

    The dataclass is the task's configuration. Its data is a pure function of that configuration, its seed
    included, and of the split's name: the global random state is neither read nor changed.
    """

    @property
    def vocab_size(self) -> int:
        """Number of input tokens."""
        ...

    @property
    def n_outputs(self) -> int:
        """Number of target classes."""
        ...

    @property
    def chance(self) -> float:
        """Expected accuracy of a uniform guess."""
        ...

    @property
    def trivial_score(self) -> float:
        """Test accuracy of the best predictor that never looks at its input."""
        ...

    @property
    def reset_token(self) -> int | None:
        """The input token that makes all inputs before it irrelevant; None where the task has none."""
        ...

    def split(self, name: SplitName) -> Split:
        """Return the samples of one split; the splits share none."""
        ...

    def score(self, predictions: Int64[Tensor, "n t"], split: Split) -> Mapping[str, Any]:
        """Compare predicted classes with the targets of a split; the result is JSON and has "accuracy"."""
        ...
