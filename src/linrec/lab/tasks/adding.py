"""Adding: add two marked numbers, a number in each half of a long sequence.

Source: Hochreiter and Schmidhuber (1997), experiment 4, in the form of Arjovsky, Shah and Bengio (2016),
arXiv:1511.06464: numbers from [0, 1], a mark in each half. S4's default is 1,000 steps, with 50,000 fixed
samples. coRNN (Rusch and Mishra 2021, arXiv:2010.00951) draws new samples for every batch, with 100 steps in
its code.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from linrec.lab.tasks.base import require_at_least
from linrec.lab.tasks.regression import RegressionTask
from linrec.lab.tasks.synthetic import Drawn

__all__ = ["Adding"]


@dataclass(frozen=True, kw_only=True)
class Adding(RegressionTask):
    """Add the two marked numbers in a sequence.

        x_t = (u_t, m_t),  u_t ~ U(0, 1),  m_t = 1 at step i < h and at step j >= h, else 0
        y = u_i + u_j

    where h is half of `length`, rounded down, and steps are counted from 0.

    The constant answer 1 has a mean squared error of 1/6, the variance of the sum.

    Args:
        length: number of steps.
        fresh: whether every epoch draws new training samples, as in coRNN; in S4, all epochs share samples.

    See `DrawnTask` for the other fields.

    Source: Arjovsky, Shah and Bengio (2016), the adding problem.

    Example:
        >>> task = Adding(length=4, n_train=1, n_validation=1, n_test=1)
        >>> test = task.split("test")
        >>> [[round(x, 2) for x in step] for step in test.inputs[0].tolist()], test.targets.shape
        ([[0.77, 0.0], [0.09, 1.0], [0.92, 0.0], [0.24, 1.0]], torch.Size([1, 1]))
    """

    length: int = 1000
    fresh: bool = True
    n_features: ClassVar[int | None] = 2
    per_sequence: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_at_least(self, length=2)
        super().__post_init__()

    @property
    def n_outputs(self) -> int:
        """Real numbers per target: 1, the sum."""
        return 1

    @property
    def chance(self) -> float:
        """Mean squared error of the constant answer 1: 1/6."""
        return 1 / 6

    def draw(self, random: np.random.Generator, n: int) -> Drawn:
        """Draw n samples of `length` steps."""
        inputs = np.zeros((n, self.length, 2), np.float32)
        inputs[:, :, 0] = random.random((n, self.length), np.float32)
        half, rows = self.length // 2, np.arange(n)
        first, second = random.integers(0, half, n), random.integers(half, self.length, n)
        inputs[rows, first, 1] = inputs[rows, second, 1] = 1
        return Drawn(inputs, inputs[rows, first, :1] + inputs[rows, second, :1])
