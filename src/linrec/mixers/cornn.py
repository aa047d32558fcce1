"""coRNN: Coupled Oscillatory Recurrent Neural Network (Rusch and Mishra, 2021).

    z_t = z_{t-1} + dt (tanh(W y_{t-1} + Wc z_{t-1} + V x_t + b) - gamma y_{t-1} - eps z_{t-1})
    y_t = y_{t-1} + dt z_t

x is the input, t time, y the positions of the oscillators and the output, z their velocities, dt a time step,
gamma a frequency and eps a damping. The oscillators see each other through W and Wc. States and gradients are
bounded for small dt.
"""

import torch
from torch import Tensor, nn

from linrec.nn.cells import NonlinearMixer
from linrec.nn.mixer import State
from linrec.nn.projections import matrix
from linrec.rules import at_least, positive

__all__ = ["CoRNN"]


class CoRNN(NonlinearMixer):
    """z_t = z + dt (tanh(W y + Wc z + V x_t + b) - gamma y - eps z), y_t = y + dt z_t: coupled oscillators.

    | task of the paper | arguments |
    |---|---|
    | sequential MNIST, 256 channels | the defaults |
    | permuted sequential MNIST, 256 channels | `dt=0.076, gamma=0.4, epsilon=8` |
    | adding, 128 channels | `dt=0.06, gamma=66, epsilon=15` |
    | noisy CIFAR-10, 128 channels | `dt=0.034, gamma=1.3, epsilon=12.7` |

    V, W and Wc start as torch's Linear of all three inputs together, as in the released code.

    Args:
        d_model: width of the sequence, and number of oscillators.
        dt: time step.
        gamma: squared frequency of all oscillators.
        epsilon: damping eps of all oscillators.
        implicit: whether the damping is of z_t, as in the paper's equations: z_t is then divided by
            1 + dt eps. The released code damps z_{t-1}.
        mode: mode of `linrec.ops.nonlinear_scan`; "auto" is the loop.

    Raises:
        ValueError: a number is out of range, or the mode does not exist.

    Source:
        Rusch and Mishra, Coupled Oscillatory Recurrent Neural Network (coRNN): An accurate and (gradient)
        stable architecture for learning long time dependencies (2021), and the released code.

    Example:
        >>> mixer = CoRNN(64)
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
        implicit: bool = False,
        mode: str = "auto",
    ) -> None:
        super().__init__(d_model, mode, 2 * d_model)
        positive(dt=dt)
        at_least(0, gamma=gamma, epsilon=epsilon)
        self.dt, self.gamma, self.epsilon = dt, gamma, epsilon
        self.implicit = implicit

        self.V = nn.Linear(d_model, d_model)
        # Wc, then W: of the joined state
        self.W = nn.Linear(2 * d_model, d_model, bias=False)
        bound = (3 * d_model) ** -0.5
        for weight in self.parameters():
            nn.init.uniform_(weight, -bound, bound)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y of every step, and the last z and y, joined (b, 2 d_model)."""
        W = matrix(self.W, 2 * self.d_model, x.device)
        zy, state = self.nonlinear_scan(self._cell, self.V(x), W, state=state, reset=reset)
        return zy[..., self.d_model :], state

    def _cell(self, zy: Tensor, Vx: Tensor, W: Tensor) -> Tensor:
        """Return z_t and y_t, joined."""
        z, y = zy.chunk(2, -1)
        force = torch.tanh(Vx + zy @ W.mT) - self.gamma * y
        if self.implicit:
            z = (z + self.dt * force) / (1 + self.dt * self.epsilon)
        else:
            z = z + self.dt * (force - self.epsilon * z)
        return torch.cat([z, y + self.dt * z], -1)
