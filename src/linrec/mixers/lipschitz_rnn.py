"""Lipschitz RNN (Erichson, Azencot, Queiruga, Hodgkinson and Mahoney, 2021), and noise in its training.

    f(h, x) = alpha A h + tanh(W h + U x + b)
    A = (1 - beta) (M_A + M_A^T) + beta (M_A - M_A^T) - gamma I,  and W in the same way from M_W
    h_t = h_{t-1} + epsilon f(h_{t-1}, x_t)                                     forward Euler
    h_t = h_{t-1} + epsilon f(h_{t-1} + epsilon / 2 f(h_{t-1}, x_t), x_t)       midpoint (RK2)

x is the input, t time, h the hidden state and output, epsilon a time step and gamma a damping. beta is from 0
for symmetric to 1 for antisymmetric matrices A and W. tanh is Lipschitz, so A and W bound how fast two
trajectories part.

Noisy RNN (Lim, Erichson, Hodgkinson and Mahoney, 2021), in training:

    h_t = h_{t-1} + d * m_t * f(h_{t-1}, x_t) + s_a N(0, I),    m_t uniform in [1 - s_m, 1]

with * the product of channels, and d a learned time step of every channel.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from linrec.nn.mixer import Mixer, State
from linrec.nn.parameters import mark
from linrec.nn.skew import skewed
from linrec.ops.nonlinear_scan import nonlinear_scan
from linrec.rules import at_least, choice, positive, require

__all__ = ["LipschitzRNN"]

Solver = Literal["euler", "midpoint"]


class LipschitzRNN(Mixer):
    """h_t = h + epsilon (A h + tanh(W h + U x_t + b)): A and W are nearly antisymmetric.

    | task of the papers, 128 channels | arguments |
    |---|---|
    | sequential and permuted sequential MNIST | the defaults |
    | both with noise | `epsilon=0.01, learned_step=True, add_noise=0.02, mult_noise=0.02` |
    | both with more noise | `epsilon=0.01, learned_step=True, add_noise=0.05, mult_noise=0.02` |
    | both, the antisymmetric RNN | `epsilon=0.01, beta=1, gamma=1e-4, alpha=0` |

    The settings are in the released code. Initial values too: M_A and M_W are normal with standard deviation
    `init_std` / d_model, and U and b are of torch's Linear. d is marked as group "transition" without weight
    decay. `mode` is that of `linrec.ops.nonlinear_scan`. Noise is drawn before the first iteration.

    Args:
        d_model: width of the sequence and of the state.
        epsilon: time step, or the initial d.
        beta: from 0 for symmetric to 1 for antisymmetric matrices.
        gamma: damping of A and W.
        gamma_w: damping of W; None is `gamma`.
        alpha: factor of A h; the ablation without A is 0.
        solver: "euler" or "midpoint".
        learned_step: whether d takes the place of `epsilon`, as in the Noisy RNN.
        add_noise: standard deviation s_a of noise in training.
        mult_noise: s_m of noise in training, from 0 to 1.
        init_std: scale of the initial M_A and M_W.
        mode: how the recurrence runs: "auto" is the loop.

    Raises:
        ValueError: a number is out of range, or the solver or the mode does not exist.

    Source:
        Erichson and others, Lipschitz Recurrent Neural Networks (2021); Lim and others, Noisy Recurrent
        Neural Networks (2021); and the released code of both.

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
        gamma_w: float | None = None,
        alpha: float = 1.0,
        solver: Solver = "euler",
        learned_step: bool = False,
        add_noise: float = 0.0,
        mult_noise: float = 0.0,
        init_std: float = 0.1,
        mode: str = "auto",
    ) -> None:
        super().__init__(d_model)
        positive(epsilon=epsilon)
        at_least(0, gamma=gamma, alpha=alpha, add_noise=add_noise, init_std=init_std)
        at_least(0, gamma_w=gamma_w, or_none=True)
        for name, value in {"beta": beta, "mult_noise": mult_noise}.items():
            require(0 <= value <= 1, f"`{name}` must be in [0, 1]; got {value}.")
        choice(Solver, solver=solver)
        nonlinear_scan.operator.check_mode(mode)
        self.epsilon, self.beta, self.gamma, self.alpha = epsilon, beta, gamma, alpha
        self.gamma_w = gamma if gamma_w is None else gamma_w
        self.add_noise, self.mult_noise = add_noise, mult_noise
        self.solver, self.mode = solver, mode

        self.U = nn.Linear(d_model, d_model)
        std = init_std / d_model
        self.M_A = nn.Parameter(std * torch.randn(d_model, d_model))
        self.M_W = nn.Parameter(std * torch.randn(d_model, d_model))
        self.d = nn.Parameter(torch.full((d_model,), epsilon)) if learned_step else None
        if learned_step:
            mark(self, "d", float32=True)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return h of every step, and the last h (b, d_model)."""
        dtype = self.state_dtype
        A = self.alpha * skewed(self.M_A.to(dtype), self.beta, self.gamma)
        W = skewed(self.M_W.to(dtype), self.beta, self.gamma_w)
        weights = (A, W) if self.d is None else (A, W, self.d)
        Ux = self.U(x)
        inputs = torch.stack([Ux, *self._noise(Ux)], 2)
        start = self.init_state(len(x), device=x.device) if state is None else state
        return nonlinear_scan(self._cell, inputs, weights, state=start, reset=reset, mode=self.mode)

    def _noise(self, Ux: Tensor) -> list[Tensor]:
        """Return m_t and the noise that is added; nothing without noise."""
        if not self.training or not (self.add_noise or self.mult_noise):
            return []
        return [1 - self.mult_noise * torch.rand_like(Ux), self.add_noise * torch.randn_like(Ux)]

    def _cell(self, h: Tensor, inputs: Tensor, A: Tensor, W: Tensor, *learned: Tensor) -> Tensor:
        """Return h_t."""
        Ux, *noise = inputs.unbind(1)
        d = learned[0] if learned else self.epsilon

        def f(h: Tensor) -> Tensor:
            return h @ A.mT + torch.tanh(h @ W.mT + Ux)

        change = d * (f(h) if self.solver == "euler" else f(h + d / 2 * f(h)))
        if not noise:
            return h + change
        m, added = noise
        return h + m * change + added

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> State:
        """Return zeros (batch, d_model)."""
        return torch.zeros(batch, self.d_model, **self.factory_kwargs(device))
