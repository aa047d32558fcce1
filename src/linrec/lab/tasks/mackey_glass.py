"""Mackey-Glass: forecast a chaotic series, the solution of a delay differential equation.

Source: Mackey and Glass (1977) for the equation. The data follow the Legendre memory unit (Voelker, Kajić and
Eliasmith 2019) and S4's code: 5,000 steps, tau = 17, 15 steps ahead. S4's code has 1,024 training and 64 test
sequences, integrates with steps of 0.1, and maps the series by tanh(x - 1).
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Float64

from linrec.lab.tasks.base import require_at_least
from linrec.lab.tasks.regression import RegressionTask
from linrec.lab.tasks.synthetic import Drawn

__all__ = ["MackeyGlass"]

SUBSTEPS = 10
"""Integration steps per unit of time, which is a step of the sequence."""


@dataclass(frozen=True, kw_only=True)
class MackeyGlass(RegressionTask):
    """Forecast a chaotic series at every step.

        dx/ds = 0.2 x(s - tau) / (1 + x(s - tau)^10) - 0.1 x(s)      by Euler's method with steps of 0.1
        u_t = tanh(x(washout + t) - 1),    y_t = u_{t + horizon}

    The initial value of x is 1.2; earlier values are uniform on [1.1, 1.3], and different for every sequence.
    The model must be causal: a bidirectional model can read most targets from its inputs.

    Args:
        length: number of steps.
        horizon: number of steps between input and target.
        tau: delay, in steps; the series is chaotic from 17 on.
        washout: number of simulated steps before the sequence begins.

    See `DrawnTask` for the other fields.

    Source: Voelker, Kajić and Eliasmith (2019), who also report a normalised root mean squared error.

    Example:
        >>> task = MackeyGlass(length=40, n_train=1, n_validation=1, n_test=1)
        >>> test = task.split("test")
        >>> bool((test.inputs[0, 15:] == test.targets[0, :-15]).all())
        True
    """

    length: int = 5000
    n_train: int = 1024
    n_validation: int = 64
    n_test: int = 64
    horizon: int = 15
    tau: int = 17
    washout: int = 100
    n_features: ClassVar[int | None] = 1
    per_sequence: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_at_least(self, length=1, horizon=1, tau=1, washout=0)
        super().__post_init__()

    @property
    def n_outputs(self) -> int:
        """Real numbers per target: 1."""
        return 1

    @property
    def chance(self) -> float:
        """Mean squared error of the training mean, as `trivial_score`; the task has no natural constant."""
        return self.trivial_score

    def draw(self, random: np.random.Generator, n: int) -> Drawn:
        """Draw n samples of `length` steps."""
        series = np.tanh(self._series(random, n) - 1).astype(np.float32)[:, :, None]
        return Drawn(
            np.ascontiguousarray(series[:, : self.length]), np.ascontiguousarray(series[:, self.horizon :])
        )

    def _series(self, random: np.random.Generator, n: int) -> Float64[np.ndarray, "n t"]:
        steps, delay = self.length + self.horizon, self.tau * SUBSTEPS
        # ring buffer of the latest `delay` values of x; the next value replaces the oldest
        past = 1.2 + 0.2 * (random.random((delay, n)) - 0.5)
        x = np.full(n, 1.2)
        series = np.empty((steps, n))
        squares, growth = np.empty(n), np.empty(n)
        for substep in range((self.washout + steps) * SUBSTEPS):
            delayed = past[substep % delay]
            # the tenth power as products, which are many times as fast as `**`
            np.multiply(delayed, delayed, out=squares)
            np.multiply(squares, squares, out=growth)
            growth *= growth
            growth *= squares
            growth += 1
            np.divide(delayed, growth, out=growth)
            growth *= 0.2 / SUBSTEPS
            delayed[:] = x
            x *= 1 - 0.1 / SUBSTEPS
            x += growth
            step, rest = divmod(substep + 1, SUBSTEPS)
            if rest == 0 and step > self.washout:
                series[step - self.washout - 1] = x
        return series.T
