"""Tasks of dynamics: add, forecast or estimate real numbers along a sequence."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float, Float64
from numpy.typing import NDArray
from torch import Tensor

from linrec.lab.tasks.base import Split
from linrec.lab.tasks.drawing import without_replacement
from linrec.lab.tasks.synthetic import Drawn, RegressionTask

__all__ = ["Adding", "FitzHughNagumo", "IrregularSines", "MackeyGlass", "Pendulum"]

EULER_STEPS = 10
"""Steps of Mackey-Glass per unit of time, which is a step of the sequence."""
SUBSTEPS = 8
"""Runge-Kutta steps of FitzHugh-Nagumo per step of a sequence; the error of v is then below 1e-5."""
RESTORING = 3 * 9.81
"""Coefficient of sin(theta): torque m g l over inertia m l^2 / 3, as in the code of Becker and others."""
FRICTION = 0.1
CLEAN = 5
"""Number of frames of the pendulum without noise at the beginning."""
AT_ONCE = 64
"""Number of films of the pendulum that are drawn at once, to bound the memory."""


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

    Source: Hochreiter and Schmidhuber (1997), experiment 4, in the form of Arjovsky, Shah and Bengio (2016,
    arXiv:1511.06464). S4's default is 1,000 steps, with 50,000 samples. coRNN (Rusch and Mishra 2021,
    arXiv:2010.00951) has 100 steps in its code.

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
    least: ClassVar[Mapping[str, int]] = {"length": 2}

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

    Source: Mackey and Glass (1977) for the equation; the Legendre memory unit (Voelker, Kajić and Eliasmith
    2019), which also reports a normalised root mean squared error, and S4's code: 5,000 steps, tau = 17, 15
    steps ahead, 1,024 training and 64 test sequences, steps of 0.1, and tanh(x - 1).

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
    least: ClassVar[Mapping[str, int]] = {"length": 1, "horizon": 1, "tau": 1, "washout": 0}

    def draw(self, random: np.random.Generator, n: int) -> Drawn:
        """Draw n samples of `length` steps."""
        series = np.tanh(self._series(random, n) - 1).astype(np.float32)[:, :, None]
        return Drawn(
            np.ascontiguousarray(series[:, : self.length]), np.ascontiguousarray(series[:, self.horizon :])
        )

    def _series(self, random: np.random.Generator, n: int) -> Float64[np.ndarray, "n t"]:
        steps, delay = self.length + self.horizon, self.tau * EULER_STEPS
        # ring buffer of the latest `delay` values of x; the next value replaces the oldest
        past = 1.2 + 0.2 * (random.random((delay, n)) - 0.5)
        x = np.full(n, 1.2)
        series = np.empty((steps, n))
        squares, growth = np.empty(n), np.empty(n)
        for substep in range((self.washout + steps) * EULER_STEPS):
            delayed = past[substep % delay]
            # the tenth power as products, which are many times as fast as `**`
            np.multiply(delayed, delayed, out=squares)
            np.multiply(squares, squares, out=growth)
            growth *= growth
            growth *= squares
            growth += 1
            np.divide(delayed, growth, out=growth)
            growth *= 0.2 / EULER_STEPS
            delayed[:] = x
            x *= 1 - 0.1 / EULER_STEPS
            x += growth
            step, rest = divmod(substep + 1, EULER_STEPS)
            if rest == 0 and step > self.washout:
                series[step - self.washout - 1] = x
        return series.T


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

    Source: FitzHugh (1961) and Nagumo, Arimoto and Yoshizawa (1962) for the equations; Rusch, Mishra,
    Erichson and Mahoney (2022, arXiv:2110.04744), LEM, for the task: 1,000 steps over a time of 400, 128
    sequences each for training and validation, 1,024 for testing, and the root of the mean squared error. The
    released code integrates with tolerances of 1e-3.

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
    least: ClassVar[Mapping[str, int]] = {"length": 1}

    def check(self) -> None:
        """Require a time between steps at which the integration is exact."""
        if not 0 < self.dt <= 1:
            raise ValueError(
                f"`dt` must be greater than 0 and at most 1, so that the integration is exact; got {self.dt}."
            )

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
        """Return v at the times 0, dt, ..., length dt, from v and w at time 0."""
        state, h = start, self.dt / SUBSTEPS
        v = np.empty((start.shape[1], self.length + 1))
        v[:, 0] = state[0]
        for step in range(1, self.length + 1):
            for _ in range(SUBSTEPS):
                state = runge_kutta(_neuron, state, h)
            v[:, step] = state[0]
        return v


def _neuron(state: Float64[np.ndarray, "2 n"]) -> Float64[np.ndarray, "2 n"]:
    """Return v' and w'."""
    v, w = state
    # products, which are many times as fast as `**`
    return np.stack([v - v * v * v / 3 - w + 0.5, (v + 0.7 - 0.8 * w) / 50])


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

    Source: Rubanova, Chen and Duvenaud (2019, arXiv:1907.03907), latent ODEs: the periodic signals of their
    released code, with 100 points in a time of 5, of which 50 are shown, and 800 sequences for training and
    200 for testing. There, all sequences have the same times, and the phase is a sum over the points instead
    of the integral. The noise is uniform in [0, 0.01]. All points are targets, and models see the later
    points too.

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
    least: ClassVar[Mapping[str, int]] = {"length": 2, "noise": 0}

    def check(self) -> None:
        """Require a share of shown points, and a positive duration."""
        if not 0 < self.shown < 1:
            raise ValueError(f"`shown` must be between 0 and 1; got {self.shown}.")
        if not self.duration > 0:
            raise ValueError(f"`duration` must be positive; got {self.duration}.")

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


@dataclass(frozen=True, kw_only=True)
class Pendulum(RegressionTask):
    """Estimate the angle of a pendulum from noisy images at irregular times.

        theta'' = 3 g sin(theta) - friction theta',   theta(0) ~ U(0, 2 pi),   theta'(0) = 0
        x_i = (image of frame s_i, s_i - s_{i-1}),   y_i = (sin theta, cos theta) at frame s_i

    The pendulum has length 1, mass 1 and the inertia 1/3 of a rod; theta = 0 is the upright position. Frames
    are `dt` apart. At each frame, a random push ~ N(0, push^2) is added to the velocity.

    An image shows a line from the centre in the direction of the pendulum, blended with uniform noise. The
    weight of the line is a random walk over frames, with a uniform start in [0, 1], steps ~ U(-0.2, 0.2), and
    clipping to [0, 1]. Then the weights are rescaled so that t_1 ~ U(0, 0.25) maps to 0 and t_2 ~ U(0.75, 1)
    maps to 1, and clipped again; each sequence has its own t_1 and t_2. The first 5 frames are clean.

    The last feature of a step is the number of frames since the image before; the first image counts from
    frame -1.

    Args:
        length: number of images in a sequence, at random frames.
        n_frames: number of simulated frames.
        size: rows and columns of an image, in pixels.
        dt: time between frames, in seconds.
        push: standard deviation of the random change of velocity per frame, in radians per second.
        with_dt: whether batches have `dt`, for mixers that take irregular steps: the number of frames since
            the image before, and 1 at the first image. It is a feature too.

    Source: Becker and others (2019, arXiv:1905.07357) for the images and their noise; Schirmer and others
    (2022, arXiv:2111.11344) for irregular times. S5 (Smith, Warrington and Linderman 2022, arXiv:2208.04933)
    has the same setting: 50 of 100 frames, 2,000 training sequences and 1,000 each for validation and
    testing. This simulation is a new implementation, with anti-aliased lines and a higher-order integrator.

    Example:
        >>> task = Pendulum(length=10, n_frames=20, n_train=1, n_validation=1, n_test=1)
        >>> test = task.split("test")
        >>> test.inputs.shape, int(test.inputs[0, :, -1].sum()) <= 20
        (torch.Size([1, 10, 577]), True)
    """

    length: int = 50
    n_train: int = 2000
    n_frames: int = 100
    size: int = 24
    dt: float = 0.01
    push: float = 0.1
    with_dt: bool = False
    per_sequence: ClassVar[bool] = False
    n_outputs: ClassVar[int] = 2
    least: ClassVar[Mapping[str, int]] = {"length": 1, "size": 2, "push": 0}

    def check(self) -> None:
        """Require a frame for every image, and a positive time between frames."""
        if self.length > self.n_frames:
            raise ValueError(
                f"`length` must be at most `n_frames` = {self.n_frames}; got {self.length}. Every image has "
                "its own frame: pass more frames."
            )
        if not self.dt > 0:
            raise ValueError(f"`dt` must be positive, in seconds; got {self.dt}.")

    @property
    def unit(self) -> float | None:
        """One frame; None without `with_dt`."""
        return 1.0 if self.with_dt else None

    @property
    def n_features(self) -> int:
        """Number of input features per step: the pixels, row by row, and the time since the step before."""
        return self.size**2 + 1

    @property
    def chance(self) -> float:
        """Mean squared error of the constant answer (0, 0): 1/2."""
        return 1 / 2

    def draw(self, random: np.random.Generator, n: int) -> Drawn:
        """Draw n samples of `length` steps."""
        angles, shares = self._angles(random, n), self._shares(random, n)
        frames = np.sort(without_replacement(random, n, self.length, self.n_frames), axis=1)
        angles, shares = (np.take_along_axis(values, frames, axis=1) for values in (angles, shares))
        inputs = np.empty((n, self.length, self.n_features), np.float32)
        inputs[:, :, -1] = np.diff(frames, axis=1, prepend=-1)
        for start in range(0, n, AT_ONCE):
            some = slice(start, start + AT_ONCE)
            share = shares[some, :, None].astype(np.float32)
            pictures = self.pictures(angles[some])
            noise = random.random(pictures.shape, np.float32)
            inputs[some, :, :-1] = share * pictures + (1 - share) * noise
        targets = np.stack([np.sin(angles), np.cos(angles)], axis=-1).astype(np.float32)
        return Drawn(inputs, targets)

    def pictures(self, angles: Float64[np.ndarray, "*n"]) -> NDArray[np.float32]:
        """Return images of a line from the centre at each angle; 0 is upwards, and angles grow clockwise.

            value = clip(1.5 - distance of the pixel from the line, 0, 1)

        Args:
            angles: shape (*n), radians.

        Returns:
            Shape (*n, size * size), float32, rows from the top. The length of the line is 0.4 `size`.
        """
        along = (np.arange(self.size, dtype=np.float32) - (self.size - 1) / 2).astype(np.float32)
        right, up = np.tile(along, self.size), -np.repeat(along, self.size)
        sine, cosine = (f(angles).astype(np.float32)[..., None] for f in (np.sin, np.cos))
        # distance of the nearest point of the line from the centre
        nearest = np.clip(right * sine + up * cosine, 0, np.float32(0.4 * self.size))
        distance = np.hypot(right - nearest * sine, up - nearest * cosine)
        return np.clip(np.float32(1.5) - distance, 0, 1)

    def _angles(self, random: np.random.Generator, n: int) -> NDArray[np.float64]:
        # angle and velocity
        state = np.stack([random.uniform(0, 2 * math.pi, n), np.zeros(n)])
        angles = np.empty((n, self.n_frames))
        for frame in range(self.n_frames):
            angles[:, frame] = state[0]
            state = runge_kutta(_swing, state, self.dt)
            state[1] += self.push * random.standard_normal(n)
        return angles

    def _shares(self, random: np.random.Generator, n: int) -> NDArray[np.float64]:
        walk, share = np.empty((n, self.n_frames)), random.random(n)
        steps = random.uniform(-0.2, 0.2, (n, self.n_frames))
        for frame in range(self.n_frames):
            walk[:, frame] = share
            share = np.clip(share + steps[:, frame], 0, 1)
        low, high = random.uniform(0, 0.25, (n, 1)), random.uniform(0.75, 1, (n, 1))
        shares = np.clip((walk - low) / (high - low), 0, 1)
        shares[:, :CLEAN] = 1
        return shares


def _swing(state: Float64[np.ndarray, "2 n"]) -> Float64[np.ndarray, "2 n"]:
    """Return the changes of angle and velocity."""
    angle, velocity = state
    return np.stack([velocity, RESTORING * np.sin(angle) - FRICTION * velocity])


def runge_kutta(
    change: Callable[[Float64[np.ndarray, "2 n"]], Float64[np.ndarray, "2 n"]],
    state: Float64[np.ndarray, "2 n"],
    dt: float,
) -> Float64[np.ndarray, "2 n"]:
    """Return the state after a time step by the classical Runge-Kutta method; `change` is its derivative."""
    one = change(state)
    two = change(state + dt / 2 * one)
    three = change(state + dt / 2 * two)
    four = change(state + dt * three)
    return state + dt / 6 * (one + 2 * two + 2 * three + four)
