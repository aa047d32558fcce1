"""LEM: Long Expressive Memory (Rusch, Mishra, Erichson and Mahoney, 2022).

    Dt_t  = dt sigmoid(W_1 y_{t-1} + V_1 x_t + b_1)
    Dt'_t = dt sigmoid(W_2 y_{t-1} + V_2 x_t + b_2)
    z_t = (1 - Dt_t) z_{t-1} + Dt_t tanh(W_z y_{t-1} + V_z x_t + b_z)
    y_t = (1 - Dt'_t) y_{t-1} + Dt'_t tanh(W_y z_t + V_y x_t + b_y)

x is the input, t time, y and z the two states, y the output, dt the largest time step, and Dt and Dt' learned
time steps of every channel: an ordinary differential equation with many time scales.
"""

import torch
from torch import Tensor, nn

from linrec.nn.cells import NonlinearMixer
from linrec.nn.mixer import State
from linrec.nn.projections import matrix
from linrec.rules import require

__all__ = ["LEM"]


class LEM(NonlinearMixer):
    """z_t and y_t relax towards tanh of each other and of x_t, with time steps Dt <= dt that y and x choose.

    | task of the paper | arguments |
    |---|---|
    | FitzHugh-Nagumo, 16 channels; Google12, 128 channels | the defaults |
    | sequential MNIST, 128 channels | `dt=0.21` |
    | permuted sequential MNIST, 128 channels | `dt=0.31` |
    | noisy CIFAR-10, 128 channels | `dt=0.44` |
    | adding, 128 channels | `dt=0.0242` |
    | heart rate, 128 channels | `dt=0.2371` |
    | EigenWorms, 32 channels | `dt=0.00017` |

    All weights and biases start uniform in +- d_model^(-1/2), as in the released code. Its plain torch cell
    has two biases in every sum; its CUDA code and this mixer have the one of the paper.

    Args:
        d_model: width of the sequence, and of y and z.
        dt: largest time step, in (0, 1]. The states then stay within [-1, 1].
        mode: mode of `linrec.ops.nonlinear_scan`; "auto" is the loop.

    Raises:
        ValueError: `dt` is out of range, or the mode does not exist.

    Source:
        Rusch and others, Long Expressive Memory for Sequence Modeling (2022), and the released code.

    Example:
        >>> mixer = LEM(64)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 128]))
    """

    def __init__(self, d_model: int, *, dt: float = 1.0, mode: str = "auto") -> None:
        super().__init__(d_model, mode, 2 * d_model)
        require(0 < dt <= 1, f"`dt` must be in (0, 1]; got {dt}.")
        self.dt = dt

        # in the order of the released code: V_2, V_1, V_y, V_z; W_2, W_1, W_z
        self.V = nn.Linear(d_model, 4 * d_model)
        self.W = nn.Linear(d_model, 3 * d_model, bias=False)
        self.W_y = nn.Linear(d_model, d_model, bias=False)
        for weight in self.parameters():
            nn.init.uniform_(weight, -(d_model**-0.5), d_model**-0.5)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y of every step, and the last z and y, joined (b, 2 d_model)."""
        weights = matrix(self.W, self.d_model, x.device), matrix(self.W_y, self.d_model, x.device)
        zy, state = self.nonlinear_scan(self._cell, self.V(x), weights, state=state, reset=reset)
        return zy[..., self.d_model :], state

    def _cell(self, zy: Tensor, Vx: Tensor, W: Tensor, W_y: Tensor) -> Tensor:
        """Return z_t and y_t, joined."""
        z, y = zy.chunk(2, -1)
        of_steps, Vx_y, Vx_z = Vx.split([2 * self.d_model, self.d_model, self.d_model], -1)
        Wy, Wy_z = (y @ W.mT).split([2 * self.d_model, self.d_model], -1)
        step_y, step_z = (self.dt * torch.sigmoid(of_steps + Wy)).chunk(2, -1)
        z = (1 - step_z) * z + step_z * torch.tanh(Wy_z + Vx_z)
        y = (1 - step_y) * y + step_y * torch.tanh(z @ W_y.mT + Vx_y)
        return torch.cat([z, y], -1)
