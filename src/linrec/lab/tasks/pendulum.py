"""Pendulum: estimate the angle of a pendulum from noisy images at irregular times.

Source: Becker and others (2019), arXiv:1905.07357, for the images and their noise; Schirmer and others
(2022), arXiv:2111.11344, for irregular times. S5 (Smith, Warrington and Linderman 2022, arXiv:2208.04933) has
the same setting: 50 of 100 frames, 2,000 training sequences and 1,000 each for validation and testing. This
simulation is a new implementation, with anti-aliased lines and a higher-order integrator.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Float64
from numpy.typing import NDArray

from linrec.lab.tasks.base import require_at_least
from linrec.lab.tasks.drawing import without_replacement
from linrec.lab.tasks.regression import RegressionTask
from linrec.lab.tasks.synthetic import Drawn

__all__ = ["Pendulum"]

GRAVITY = 9.81
RESTORING = 3 * GRAVITY
"""Coefficient of sin(theta): torque m g l over inertia m l^2 / 3, as in the code of Becker and others."""
FRICTION = 0.1
CLEAN = 5
"""Number of frames without noise at the beginning."""
AT_ONCE = 64
"""Number of sequences that are drawn at once, to bound the memory."""


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

    See `DrawnTask` for the other fields.

    Source: Schirmer and others (2022); see the module's docstring.

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

    def __post_init__(self) -> None:
        require_at_least(self, length=1, size=2, push=0)
        if self.length > self.n_frames:
            raise ValueError(
                f"`length` must be at most `n_frames` = {self.n_frames}; got {self.length}. Every image has "
                "its own frame: pass more frames."
            )
        if not self.dt > 0:
            raise ValueError(f"`dt` must be positive, in seconds; got {self.dt}.")
        super().__post_init__()

    @property
    def unit(self) -> float | None:
        """One frame; None without `with_dt`."""
        return 1.0 if self.with_dt else None

    @property
    def n_features(self) -> int:
        """Number of input features per step: the pixels, row by row, and the time since the step before."""
        return self.size**2 + 1

    @property
    def n_outputs(self) -> int:
        """Real numbers per target: 2, sine and cosine."""
        return 2

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
        angle, velocity = random.uniform(0, 2 * math.pi, n), np.zeros(n)
        angles = np.empty((n, self.n_frames))
        for frame in range(self.n_frames):
            angles[:, frame] = angle
            angle, velocity = _moved(angle, velocity, self.dt)
            velocity = velocity + self.push * random.standard_normal(n)
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


def _moved(
    angle: NDArray[np.float64], velocity: NDArray[np.float64], dt: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return angle and velocity after a time step, by a fourth-order Runge-Kutta step."""

    def change(angle: NDArray[np.float64], velocity: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.stack([velocity, RESTORING * np.sin(angle) - FRICTION * velocity])

    here = np.stack([angle, velocity])
    one = change(*here)
    two = change(*(here + dt / 2 * one))
    three = change(*(here + dt / 2 * two))
    four = change(*(here + dt * three))
    angle, velocity = here + dt / 6 * (one + 2 * two + 2 * three + four)
    return angle, velocity
