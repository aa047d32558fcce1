"""Pendulum: the angle of a pendulum from noisy pictures that were taken at irregular times.

Source: Becker and others (2019), arXiv:1905.07357, for the pictures and their noise; Schirmer and others
(2022), arXiv:2111.11344, for irregular times, which S5 (Smith, Warrington and Linderman 2022,
arXiv:2208.04933) has too: 50 of 100 frames, 2,000 sequences to train and 1,000 each to validate and to test.
The simulation is written anew: lines are drawn smoothly, and the motion is integrated to a higher order.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Float64
from numpy.typing import NDArray

from linrec.tasks.base import require_at_least
from linrec.tasks.drawing import without_replacement
from linrec.tasks.regression import RegressionTask
from linrec.tasks.synthetic import Drawn

__all__ = ["Pendulum"]

GRAVITY = 9.81
RESTORING = 3 * GRAVITY
"""Of sin(theta): the torque m g l by the inertia m l^2 / 3 of a rod, as in the code of Becker and others."""
FRICTION = 0.1
CLEAN = 5
"""Frames without noise at the beginning."""
AT_ONCE = 64
"""Sequences that are drawn together, so that the memory of their noise stays small."""


@dataclass(frozen=True, kw_only=True)
class Pendulum(RegressionTask):
    """Say at every picture where the pendulum is.

        theta'' = 3 g sin(theta) - friction theta',   theta(0) ~ U(0, 2 pi),   theta'(0) = 0
        x_i = (picture at the time of frame s_i, s_i - s_{i-1}),   y_i = (sin theta, cos theta) there

    The pendulum of length 1 and mass 1 stands upright at 0, and has the inertia of a rod, 1/3. Its frames are
    `dt` apart, and at each one its velocity gets a push ~ N(0, push^2). A picture is a line from the middle
    to where the pendulum points, and fades into uniform noise and back. Its share is a random walk over the
    frames that starts anywhere in [0, 1], stays there, and has steps ~ U(-0.2, 0.2); then it is stretched so
    that what is below t_1 ~ U(0, 0.25) becomes 0 and what is above t_2 ~ U(0.75, 1) becomes 1, with
    thresholds of each sequence. The first 5 frames are clean. The last feature is the number of frames since
    the picture before; of the first one, since before the start.

    Args:
        length: pictures of a sequence, of frames that are chosen at random.
        n_frames: frames that there are.
        size: pixels on each side of a picture.
        dt: seconds from frame to frame.
        push: standard deviation of what is added to the velocity at each frame, in radians per second.

    The other fields are those of `DrawnTask`.

    Source: Schirmer and others (2022); see the module's text.

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
    per_sequence: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_at_least(self, length=1, size=2, push=0)
        if self.length > self.n_frames:
            raise ValueError(
                f"`length` must be at most `n_frames` = {self.n_frames}; got {self.length}. Each picture is "
                "of a frame of its own: pass more frames."
            )
        if not self.dt > 0:
            raise ValueError(f"`dt` must be greater than 0 seconds; got {self.dt}.")
        super().__post_init__()

    @property
    def n_features(self) -> int:
        """Real numbers per step: pixels, row after row, and the time since the step before."""
        return self.size**2 + 1

    @property
    def n_outputs(self) -> int:
        """Real numbers in a target: sine and cosine."""
        return 2

    @property
    def chance(self) -> float:
        """Mean squared error of always answering (0, 0): 1/2."""
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
        """Draw a line from the middle towards each angle, which is 0 upwards and grows clockwise.

            value = clip(1.5 - distance of the pixel from the line, 0, 1)

        Args:
            angles: shape (*n), radians.

        Returns:
            Shape (*n, size * size), float32, rows from the top; two fifths of a side are the line's length.
        """
        along = (np.arange(self.size, dtype=np.float32) - (self.size - 1) / 2).astype(np.float32)
        right, up = np.tile(along, self.size), -np.repeat(along, self.size)
        sine, cosine = (f(angles).astype(np.float32)[..., None] for f in (np.sin, np.cos))
        # the nearest point of the line, as a distance from the middle
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
    """Return angle and velocity after a time, by one step of Runge and Kutta's fourth order."""

    def change(angle: NDArray[np.float64], velocity: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.stack([velocity, RESTORING * np.sin(angle) - FRICTION * velocity])

    here = np.stack([angle, velocity])
    one = change(*here)
    two = change(*(here + dt / 2 * one))
    three = change(*(here + dt / 2 * two))
    four = change(*(here + dt * three))
    angle, velocity = here + dt / 6 * (one + 2 * two + 2 * three + four)
    return angle, velocity
