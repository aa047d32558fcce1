"""Lipschitz RNN (Erichson, Azencot, Queiruga, Hodgkinson and Mahoney, 2021).

    f(h, x) = alpha A h + tanh(W h + U x + b)
    A = (1 - beta) (M_A + M_A^T) + beta (M_A - M_A^T) - gamma I,  and W in the same way from M_W
    h_t = h_{t-1} + epsilon f(h_{t-1}, x_t)                                     forward Euler
    h_t = h_{t-1} + epsilon f(h_{t-1} + epsilon / 2 f(h_{t-1}, x_t), x_t)       midpoint (RK2)

x is the input, t time, h the hidden state and output, epsilon a time step and gamma a damping. beta is from 0
for symmetric to 1 for antisymmetric matrices A and W. tanh is Lipschitz, so A and W bound how fast two
trajectories part.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from linrec.nn.mixer import Mixer, State
from linrec.nn.skew import skewed
from linrec.ops.nonlinear_scan import nonlinear_scan
from linrec.rules import at_least, choice, positive, require

__all__ = ["LipschitzRNN", "field"]

Solver = Literal["euler", "midpoint"]


def field(
    h: Float[Tensor, "*b n"], Ux: Float[Tensor, "*b n"], A: Float[Tensor, "n n"], W: Float[Tensor, "n n"]
) -> Float[Tensor, "*b n"]:
    """Return A h + tanh(W h + U x + b).

    Args:
        h: the state.
        Ux: U x + b.
        A: matrix of the linear part, alpha included.
        W: matrix in the tanh.

    Example:
        >>> field(torch.ones(1), torch.zeros(1), torch.full((1, 1), -1.0), torch.zeros(1, 1))
        tensor([-1.])
    """
    return h @ A.mT + torch.tanh(h @ W.mT + Ux)


class LipschitzRNN(Mixer):
    """h_t = h + epsilon (A h + tanh(W h + U x_t + b)): A and W are nearly antisymmetric.

    | task of the paper, 128 channels | arguments |
    |---|---|
    | sequential and permuted sequential MNIST | the defaults |
    | both, the antisymmetric RNN | `epsilon=0.01, beta=1, gamma=1e-4, alpha=0` |

    The settings are in the released code; those of the antisymmetric RNN are in the Noisy RNN's. Initial
    values too: M_A and M_W are normal with standard deviation `init_std` / d_model, and U and b are of
    torch's Linear. `mode` is that of `linrec.ops.nonlinear_scan`. With noise in training, this network is
    `linrec.mixers.noisy_rnn`.

    Args:
        d_model: width of the sequence and of the state.
        epsilon: time step.
        beta: from 0 for symmetric to 1 for antisymmetric matrices.
        gamma: damping of A and W.
        alpha: factor of A h; the ablation without A is 0.
        solver: "euler" or "midpoint".
        init_std: scale of the initial M_A and M_W.
        mode: how the recurrence runs: "auto" is the loop.

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

    recurrence = "nonlinear_scan"

    def __init__(
        self,
        d_model: int,
        *,
        epsilon: float = 0.03,
        beta: float = 0.75,
        gamma: float = 0.001,
        alpha: float = 1.0,
        solver: Solver = "euler",
        init_std: float = 0.1,
        mode: str = "auto",
    ) -> None:
        super().__init__(d_model)
        positive(epsilon=epsilon)
        at_least(0, gamma=gamma, alpha=alpha, init_std=init_std)
        require(0 <= beta <= 1, f"`beta` must be in [0, 1]; got {beta}.")
        choice(Solver, solver=solver)
        nonlinear_scan.operator.check_mode(mode)
        self.epsilon, self.beta, self.gamma, self.alpha = epsilon, beta, gamma, alpha
        self.solver, self.mode = solver, mode

        self.U = nn.Linear(d_model, d_model)
        std = init_std / d_model
        self.M_A = nn.Parameter(std * torch.randn(d_model, d_model))
        self.M_W = nn.Parameter(std * torch.randn(d_model, d_model))

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return h of every step, and the last h (b, d_model)."""
        dtype = self.state_dtype
        A = self.alpha * skewed(self.M_A.to(dtype), self.beta, self.gamma)
        W = skewed(self.M_W.to(dtype), self.beta, self.gamma)
        return nonlinear_scan(self._cell, self.U(x), (A, W), state=state, reset=reset, mode=self.mode)

    def _cell(self, h: Tensor, Ux: Tensor, A: Tensor, W: Tensor) -> Tensor:
        """Return h_t."""
        f = field(h, Ux, A, W)
        if self.solver == "midpoint":
            f = field(h + self.epsilon / 2 * f, Ux, A, W)
        return h + self.epsilon * f

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> State:
        """Return zeros (batch, d_model)."""
        return torch.zeros(batch, self.d_model, **self.factory_kwargs(device))
