"""Irregular sines: predict hidden values of a sine of changing frequency, seen at irregular times.

Source: Rubanova, Chen and Duvenaud (2019, arXiv:1907.03907), latent ODEs: the periodic signals of their
released code, with 100 points in a time of 5, of which 50 are shown.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from linrec.lab.tasks.base import require_at_least
from linrec.lab.tasks.drawing import without_replacement
from linrec.lab.tasks.regression import RegressionTask
from linrec.lab.tasks.synthetic import Drawn

__all__ = ["IrregularSines"]


@dataclass(frozen=True, kw_only=True)
class IrregularSines(RegressionTask):
    """Predict the hidden values of a sine of changing frequency, from the values before.

        u(t) = c + sin(2 pi (f_0 t + (f_1 - f_0) t^2 / (2 T))) + noise,   c ~ N(1, 0.1^2),   f ~ U(0.4, 0.8)
        shown   x_i = (u(t_i), 1, t_i - t_{i-1})    without target
        hidden  x_i = (0,      0, t_i - t_{i-1})    y_i = u(t_i)

    The frequency changes from f_0 to f_1 over the time T. The first time is 0, and the others are uniform in
    [0, T], different for every sequence. The first point is always shown; the other shown points are random.
    The last feature is the time since the step before. So a step without value asks for the value after a
    gap. Use a causal model; a bidirectional model interpolates between the shown points.

    Args:
        length: number of points.
        shown: share of the points that are shown, rounded to a number from 1 to `length` - 1.
        duration: T.
        noise: standard deviation of the noise.
        with_dt: whether batches have `dt`, for mixers that take irregular steps: the time since the step
            before in units of `duration` / (`length` - 1), and 1 at the first step. It is a feature too.

    See `DrawnTask` for the other fields.

    Source: the released code of Rubanova and others (2019), with 800 sequences for training and 200 for
    testing. There, all sequences have the same times, and the phase is a sum over the points instead of the
    integral. The noise is uniform in [0, 0.01]. All points are targets, and models see the later points too.

    Example:
        >>> task = IrregularSines(length=4, n_train=1, n_validation=1, n_test=1)
        >>> test = task.split("test")
        >>> test.inputs[0, :, 1].tolist(), test.targets.isnan()[0, :, 0].tolist()
        ([1.0, 0.0, 1.0, 0.0], [True, False, True, False])
    """

    length: int = 100
    n_train: int = 800
    n_validation: int = 200
    n_test: int = 200
    shown: float = 0.5
    duration: float = 5.0
    noise: float = 0.01
    with_dt: bool = False
    n_features: ClassVar[int | None] = 3
    per_sequence: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_at_least(self, length=2, noise=0)
        if not 0 < self.shown < 1:
            raise ValueError(f"`shown` must be between 0 and 1; got {self.shown}.")
        if not self.duration > 0:
            raise ValueError(f"`duration` must be positive; got {self.duration}.")
        super().__post_init__()

    @property
    def n_outputs(self) -> int:
        """Real numbers per target: 1."""
        return 1

    @property
    def chance(self) -> float:
        """Mean squared error of the constant answer 1, if phases were uniform: 1/2 + 0.1^2 + noise^2."""
        return 1 / 2 + 0.1**2 + self.noise**2

    @property
    def unit(self) -> float | None:
        """The mean time between points; None without `with_dt`."""
        return self.duration / (self.length - 1) if self.with_dt else None

    def draw(self, random: np.random.Generator, n: int) -> Drawn:
        """Draw n samples of `length` steps."""
        times = np.zeros((n, self.length))
        times[:, 1:] = np.sort(random.uniform(0, self.duration, (n, self.length - 1)), axis=1)
        first, last = random.uniform(0.4, 0.8, (2, n, 1))
        phase = first * times + (last - first) * times**2 / (2 * self.duration)
        values = random.normal(1, 0.1, (n, 1)) + np.sin(2 * math.pi * phase)
        values = values + self.noise * random.standard_normal(values.shape)
        shown = np.zeros((n, self.length), np.bool_)
        shown[:, 0] = True
        more = min(max(round(self.shown * self.length), 1), self.length - 1) - 1
        shown[np.arange(n)[:, None], 1 + without_replacement(random, n, more, self.length - 1)] = True
        gaps = np.diff(times, axis=1, prepend=0)
        inputs = np.stack([np.where(shown, values, 0), shown, gaps], axis=-1)
        targets = np.where(shown, np.nan, values)[:, :, None]
        return Drawn(inputs.astype(np.float32), targets.astype(np.float32))
