"""Neural Wave Machine (Keller and Welling, 2023).

    z_t = z_{t-1} + dt (tanh(w_y @ y_{t-1} + w_z @ z_{t-1} + V x_t + b) - gamma y_{t-1} - eps z_{t-1})
    y_t = y_{t-1} + dt z_t

x is the input, t time, y the positions of oscillators on a grid and the output, z their velocities, dt a time
step, gamma a frequency and eps a damping. @ is a circular convolution over the grid: each oscillator sees its
neighbours alone, so that waves travel over the grid. `cornn` has dense matrices in its place.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, pad

from linrec.nn.cells import NonlinearMixer
from linrec.nn.mixer import State
from linrec.rules import at_least, divisor, positive, require

__all__ = ["NeuralWaveMachine"]

Neighbours = Literal["square", "row"]


class NeuralWaveMachine(NonlinearMixer):
    """z_t = z + dt (tanh(w_y @ y + w_z @ z + V x_t + b) - gamma y - eps z), y_t = y + dt z_t, on a grid.

    | task of the released code | arguments |
    |---|---|
    | sequential MNIST, 256 channels | the defaults |
    | permuted sequential MNIST, 256 channels | `dt=0.076, gamma=0.4, epsilon=8` |
    | adding, 121 channels | `dt=0.016, gamma=94.5, epsilon=9.5` |

    V starts as torch's Linear, the kernels as those of torch's Conv2d with one channel. The released code has
    two more biases, of its two convolutions.

    Args:
        d_model: width of the sequence, and number of oscillators.
        dt: time step.
        gamma: squared frequency of all oscillators.
        epsilon: damping eps of all oscillators.
        rows: rows of the grid; None is the largest divisor of d_model up to its square root, which must not
            be 1. 1 is a ring, whose oscillators have neighbours on two sides.
        neighbours: "square" for 3 x 3 oscillators, or "row" for 1 x 3.
        mode: mode of `linrec.ops.nonlinear_scan`; "auto" is the loop.

    Raises:
        ValueError: a number is out of range, `rows` does not divide `d_model`, or the neighbours or the mode
            do not exist.

    Source:
        Keller and Welling, Neural Wave Machines: Learning Spatiotemporally Structured Representations with
        Locally Coupled Oscillatory Recurrent Neural Networks (2023), and the released code.

    Example:
        >>> mixer = NeuralWaveMachine(64)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 128]))
    """

    def __init__(
        self,
        d_model: int,
        *,
        dt: float = 0.042,
        gamma: float = 2.7,
        epsilon: float = 4.7,
        rows: int | None = None,
        neighbours: Neighbours = "square",
        mode: str = "auto",
    ) -> None:
        super().__init__(d_model, mode, 2 * d_model)
        positive(dt=dt)
        at_least(0, gamma=gamma, epsilon=epsilon)
        divisor("d_model", d_model, rows=rows, or_none=True)
        self.dt, self.gamma, self.epsilon = dt, gamma, epsilon
        self.rows = max(n for n in range(1, d_model + 1) if d_model % n == 0 and n * n <= d_model)
        self.rows = self.rows if rows is None else rows
        require(
            self.rows > 1 or rows == 1 or neighbours != "square",
            f"`d_model` must be a product of rows and columns above 1; got {d_model}, a grid of one row. "
            "Choose another width, or `rows=1` for a ring.",
        )

        self.V = nn.Linear(d_model, d_model)
        # w_z, then w_y
        shape = (1, 2, 3, 3) if neighbours == "square" else (1, 2, 1, 3)
        bound = (shape[2] * shape[3]) ** -0.5
        self.w = nn.Parameter(torch.empty(shape).uniform_(-bound, bound))

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y of every step, and the last z and y, joined (b, 2 d_model)."""
        zy, state = self.nonlinear_scan(self._cell, self.V(x), self.w, state=state, reset=reset)
        return zy[..., self.d_model :], state

    def _cell(self, zy: Tensor, Vx: Tensor, w: Tensor) -> Tensor:
        """Return z_t and y_t, joined."""
        z, y = zy.chunk(2, -1)
        margin = w.shape[2] // 2
        grids = pad(zy.unflatten(-1, (2, self.rows, -1)), (1, 1, margin, margin), mode="circular")
        force = torch.tanh(Vx + conv2d(grids, w).flatten(1)) - self.gamma * y
        z = z + self.dt * (force - self.epsilon * z)
        return torch.cat([z, y + self.dt * z], -1)
