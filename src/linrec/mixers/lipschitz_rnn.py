"""Lipschitz RNN (Erichson, Azencot, Queiruga, Hodgkinson and Mahoney, 2021).

    f(h, x) = alpha A h + tanh(W h + U x + b)
    A = (1 - beta) (M_A + M_A^T) + beta (M_A - M_A^T) - gamma I,  and W in the same way from M_W
    h_t = h_{t-1} + epsilon f(h_{t-1}, x_t)                                     forward Euler
    h_t = h_{t-1} + epsilon f(h_{t-1} + epsilon / 2 f(h_{t-1}, x_t), x_t)       midpoint (RK2)

x is the input, t time, h the hidden state and output, epsilon a time step and gamma a damping. beta is from 0
for symmetric to 1 for antisymmetric matrices A and W. tanh is Lipschitz, so A and W bound how fast two
trajectories part. With a gate, f(h, x) is multiplied by sigmoid(W h + U_g x + b_g).
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.mixer import State
from linrec.nn.orthogonal import SkewFieldMixer, field
from linrec.rules import positive

__all__ = ["LipschitzRNN"]

Solver = Literal["euler", "midpoint"]


class LipschitzRNN(SkewFieldMixer):
    """h_t = h + epsilon (A h + tanh(W h + U x_t + b)): A and W are nearly antisymmetric.

    | task of the paper, 128 channels | arguments |
    |---|---|
    | sequential and permuted sequential MNIST | the defaults |
    | both, the antisymmetric RNN | `epsilon=0.01, beta=1, gamma=1e-4, alpha=0` |

    The settings are in the released code; those of the antisymmetric RNN are in the Noisy RNN's. Initial
    values too: M_A and M_W are normal with standard deviation `init_std` / d_model, and U and b are of
    torch's Linear. The gate is in the released code alone, as LipschitzRNN_gated. With noise in training, the
    network is `linrec.mixers.noisy_rnn`.

    Args:
        d_model: width of the sequence and of the state.
        epsilon: time step.
        beta: from 0 for symmetric to 1 for antisymmetric matrices.
        gamma: damping of A and W.
        alpha: factor of A h; the ablation without A is 0.
        solver: "euler" or "midpoint".
        gate: whether f has a gate, which reads W h too.
        init_std: scale of the initial M_A and M_W.
        mode: mode of `linrec.ops.nonlinear_scan`; "auto" is the loop.

    Raises:
        ValueError: a number is out of range, or the solver or the mode does not exist.

    Source:
        Erichson and others, Lipschitz Recurrent Neural Networks (2021), and the released code.

    Example:
        >>> mixer = LipschitzRNN(64)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 64]))
    """

    def __init__(
        self,
        d_model: int,
        *,
        epsilon: float = 0.03,
        beta: float = 0.75,
        gamma: float = 0.001,
        alpha: float = 1.0,
        solver: Solver = "euler",
        gate: bool = False,
        init_std: float = 0.1,
        mode: str = "auto",
    ) -> None:
        super().__init__(
            d_model, beta=beta, gamma=gamma, gamma_w=gamma, alpha=alpha, init_std=init_std, mode=mode
        )
        positive(epsilon=epsilon)
        self.epsilon, self.solver = epsilon, solver
        self.U_g = nn.Linear(d_model, d_model) if gate else None

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return h of every step, and the last h (b, d_model)."""
        Ux = self.U(x)
        if self.U_g is not None:
            Ux = torch.cat([Ux, self.U_g(x)], -1)
        return self.nonlinear_scan(self._cell, Ux, self.matrices(), state=state, reset=reset)

    def _cell(self, h: Tensor, inputs: Tensor, A: Tensor, W: Tensor) -> Tensor:
        """Return h_t."""
        Ux, *gate = inputs.split(self.d_model, -1)

        def f(h: Tensor) -> Tensor:
            slope = field(h, Ux, A, W)
            return slope * torch.sigmoid(functional.linear(h, W) + gate[0]) if gate else slope

        slope = f(h)
        if self.solver == "midpoint":
            slope = f(h + self.epsilon / 2 * slope)
        return h + self.epsilon * slope
