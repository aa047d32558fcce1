"""FitzHugh-Nagumo: predict the next value of a spiking neuron that has a fast and a slow time scale.

Source: FitzHugh (1961) and Nagumo, Arimoto and Yoshizawa (1962) for the equations; Rusch, Mishra, Erichson
and Mahoney (2022, arXiv:2110.04744), LEM, for the task: 1,000 steps over a time of 400, 128 sequences each
for training and validation, 1,024 for testing, and the root of the mean squared error.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float, Float64
from torch import Tensor

from linrec.lab.tasks.base import Split, require_at_least
from linrec.lab.tasks.regression import RegressionTask
from linrec.lab.tasks.synthetic import Drawn

__all__ = ["FitzHughNagumo"]

SUBSTEPS = 8
"""Runge-Kutta steps per step of a sequence; the error of v is then below 1e-5."""


@dataclass(frozen=True, kw_only=True)
class FitzHughNagumo(RegressionTask):
    """Predict the next value of a spiking neuron with a fast and a slow time scale.

        v' = v - v^3 / 3 - w + 0.5,   w' = (v + 0.7 - 0.8 w) / 50,   v(0) ~ U(-1, 1),   w(0) = 0
        x_t = v(t dt),   y_t = v((t + 1) dt)

    v jumps within a few steps, and w recovers over a hundred steps. w is hidden: one value of v does not
    determine the next value. The equations are integrated by the classical Runge-Kutta method with steps of
    dt / 8. The model must be causal: a bidirectional model can read most targets from its inputs.

    Args:
        length: number of steps.
        dt: time between two steps.

    See `DrawnTask` for the other fields.

    Source: Rusch and others (2022), whose released code integrates with tolerances of 1e-3.

    Example:
        >>> task = FitzHughNagumo(length=40, n_train=1, n_validation=1, n_test=1)
        >>> test = task.split("test")
        >>> bool((test.inputs[0, 1:] == test.targets[0, :-1]).all())
        True
    """

    length: int = 1000
    n_train: int = 128
    n_validation: int = 128
    n_test: int = 1024
    dt: float = 0.4
    n_features: ClassVar[int | None] = 1
    per_sequence: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_at_least(self, length=1)
        if not 0 < self.dt <= 1:
            raise ValueError(
                f"`dt` must be greater than 0 and at most 1, so that the integration is exact; got {self.dt}."
            )
        super().__post_init__()

    @property
    def n_outputs(self) -> int:
        """Real numbers per target: 1."""
        return 1

    @property
    def chance(self) -> float:
        """Mean squared error of the training mean, as `trivial_score`; the task has no natural constant."""
        return self.trivial_score

    def score(self, predictions: Float[Tensor, "n t f"], split: Split) -> dict[str, Any]:
        """Return "mse" and "nrmse" as in `RegressionTask.score`, and "rmse", the root of "mse"."""
        scores = super().score(predictions, split)
        return {**scores, "rmse": math.sqrt(scores["mse"])}

    def draw(self, random: np.random.Generator, n: int) -> Drawn:
        """Draw n samples of `length` steps."""
        start = np.stack([random.uniform(-1, 1, n), np.zeros(n)])
        v = self.solution(start)[:, :, None].astype(np.float32)
        return Drawn(np.ascontiguousarray(v[:, :-1]), np.ascontiguousarray(v[:, 1:]))

    def solution(self, start: Float64[np.ndarray, "2 n"]) -> Float64[np.ndarray, "n t"]:
        """Return v at the times 0, dt, ..., length dt.

        Args:
            start: v and w at time 0.
        """
        state, h = start, self.dt / SUBSTEPS
        v = np.empty((start.shape[1], self.length + 1))
        v[:, 0] = state[0]
        for step in range(1, self.length + 1):
            for _ in range(SUBSTEPS):
                one = _change(state)
                two = _change(state + h / 2 * one)
                three = _change(state + h / 2 * two)
                four = _change(state + h * three)
                state = state + h / 6 * (one + 2 * two + 2 * three + four)
            v[:, step] = state[0]
        return v


def _change(state: Float64[np.ndarray, "2 n"]) -> Float64[np.ndarray, "2 n"]:
    v, w = state
    # products, which are many times as fast as `**`
    return np.stack([v - v * v * v / 3 - w + 0.5, (v + 0.7 - 0.8 * w) / 50])
