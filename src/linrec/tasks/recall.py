"""Tasks with queries, at the end or in between, for tokens that the sequence showed before."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from linrec.tasks.base import NO_TARGET
from linrec.tasks.synthetic import Drawn, SyntheticTask


@dataclass(frozen=True, kw_only=True)
class RecallTask(SyntheticTask):
    """Base class of tasks with queries whose answer is the next token, so that every token can be a target.

    Args:
        predict_all: whether the training split has the next token for a target everywhere, as the code of H3,
            Hyena and MAD does; else the answers alone. What can be no output, such as noise and padding, is
            no target either. Validation and test ask for the answers in both cases.
    """

    predict_all: bool = False

    def for_training(self, drawn: Drawn) -> Drawn:
        """Return samples as the training split has them: with the next tokens as targets, where asked for."""
        if not self.predict_all:
            return drawn
        targets = drawn.targets.copy()
        # an answer is the next token too; the last one follows the inputs
        targets[:, :-1] = np.where(drawn.inputs[:, 1:] < self.n_outputs, drawn.inputs[:, 1:], NO_TARGET)
        return drawn._replace(targets=targets)

    @cached_property
    def trivial_score(self) -> float:
        """Test accuracy of always giving the most frequent answer of the training split."""
        if self.predict_all:
            # tokens that are no answers do not count
            return dataclasses.replace(self, predict_all=False).trivial_score
        return super().trivial_score
