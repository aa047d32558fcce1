"""AntisymmetricRNN (Chang, Chen, Haber and Chi, 2019).

    h_t = h_{t-1} + epsilon tanh((M - M^T - gamma I) h_{t-1} + V x_t + b)

and with a gate:

    z_t = sigmoid((M - M^T - gamma I) h_{t-1} + V_z x_t + b_z)
    h_t = h_{t-1} + epsilon z_t * tanh((M - M^T - gamma I) h_{t-1} + V x_t + b)

x is the input, t time, * the product of channels, h the hidden state and output, epsilon a time step and
gamma a damping. Eigenvalues of M - M^T are imaginary, so the differential equation of h neither grows nor
forgets.
"""

import torch
from torch import Tensor, nn

from linrec.nn.cells import NonlinearMixer
from linrec.nn.mixer import State
from linrec.nn.orthogonal import skewed
from linrec.rules import at_least, positive

__all__ = ["AntisymmetricRNN"]


class AntisymmetricRNN(NonlinearMixer):
    """h_t = h + epsilon tanh((M - M^T - gamma I) h + V x_t + b): steps of a marginally stable equation.

    `epsilon` and `gamma` are those of the Noisy RNN's released code, which runs this network on sequential
    and permuted sequential MNIST, with 128 channels. M starts normal with standard deviation
    `init_std` / d_model, as in that code; V, V_z and their biases start as torch's Linear.

    Args:
        d_model: width of the sequence and of the state.
        epsilon: time step.
        gamma: damping, against the growth that forward Euler adds.
        gated: whether there is a gate z_t, which shares M.
        init_std: scale of the initial M.
        mode: mode of `linrec.ops.nonlinear_scan`; "auto" is the loop.

    Raises:
        ValueError: a number is out of range, or the mode does not exist.

    Source:
        Chang and others, AntisymmetricRNN: A Dynamical System View on Recurrent Neural Networks (2019); the
        released code of Erichson and others, Lipschitz Recurrent Neural Networks (2021).

    Example:
        >>> mixer = AntisymmetricRNN(64)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 64]))
    """

    def __init__(
        self,
        d_model: int,
        *,
        epsilon: float = 0.01,
        gamma: float = 1e-4,
        gated: bool = False,
        init_std: float = 0.1,
        mode: str = "auto",
    ) -> None:
        super().__init__(d_model, mode)
        positive(epsilon=epsilon)
        at_least(0, gamma=gamma, init_std=init_std)
        self.epsilon, self.gamma, self.gated = epsilon, gamma, gated

        # V, then V_z
        self.V = nn.Linear(d_model, (2 if gated else 1) * d_model)
        self.M = nn.Parameter(init_std / d_model * torch.randn(d_model, d_model))

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return h of every step, and the last h (b, d_model)."""
        W = skewed(self.M.to(self.state_dtype), gamma=self.gamma)
        return self.nonlinear_scan(self._cell, self.V(x), W, state=state, reset=reset)

    def _cell(self, h: Tensor, Vx: Tensor, W: Tensor) -> Tensor:
        """Return h_t."""
        Wh = h @ W.mT
        if not self.gated:
            return h + self.epsilon * torch.tanh(Wh + Vx)
        Vx, Vx_z = Vx.chunk(2, -1)
        return h + self.epsilon * torch.sigmoid(Wh + Vx_z) * torch.tanh(Wh + Vx)
