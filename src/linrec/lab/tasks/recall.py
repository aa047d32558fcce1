"""Base class of tasks with queries for tokens that occurred earlier in the sequence."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from linrec.lab.tasks.base import NO_TARGET
from linrec.lab.tasks.synthetic import Drawn, SyntheticTask


@dataclass(frozen=True, kw_only=True)
class RecallTask(SyntheticTask):
    """Base class of tasks with queries whose answer is the next token, so that every token can be a target.

    Args:
        predict_all: whether training targets are the next tokens at all positions, as in the code of H3,
            Hyena and MAD; if not, only the answers are training targets. Tokens that are not output classes,
            such as noise and padding, are never targets. Validation and test targets are always the answers.
    """

    predict_all: bool = False

    def for_training(self, drawn: Drawn) -> Drawn:
        """Return samples with the training targets: the next tokens if `predict_all`, else the answers."""
        if not self.predict_all:
            return drawn
        targets = drawn.targets.copy()
        # an answer is also the next token; the last target comes after the inputs and is kept
        targets[:, :-1] = np.where(drawn.inputs[:, 1:] < self.n_outputs, drawn.inputs[:, 1:], NO_TARGET)
        return drawn._replace(targets=targets)

    @cached_property
    def trivial_score(self) -> float:
        """Test accuracy of always predicting the most frequent answer of the training split."""
        if self.predict_all:
            # only answers count, not the other training targets
            return dataclasses.replace(self, predict_all=False).trivial_score
        return super().trivial_score
