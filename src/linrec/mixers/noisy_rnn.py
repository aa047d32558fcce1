"""Noisy RNN: a Lipschitz RNN trained with noise in its state (Lim, Erichson, Hodgkinson and Mahoney, 2021).

    f(h, x) = alpha A h + tanh(W h + U x + b)
    A = (1 - beta) (M_A + M_A^T) + beta (M_A - M_A^T) - gamma I
    W = (1 - beta) (M_W + M_W^T) + beta (M_W - M_W^T) - gamma_W I
    h_t = h_{t-1} + d * m_t * f(h_{t-1}, x_t) + s_a n_t     in training
    h_t = h_{t-1} + d * f(h_{t-1}, x_t)                     otherwise

x is the input, t time, * the product of channels, h the hidden state and output, d a learned time step of
every channel, and gamma and gamma_W dampings. m_t is uniform in [1 - s_m, 1] and n_t is standard normal, both
drawn for every step and channel. A step is an Euler step of a stochastic differential equation. Its noise
regularises: it favours flat minima and stable dynamics.
"""

import torch
from torch import Tensor, nn

from linrec.nn.mixer import State
from linrec.nn.orthogonal import SkewFieldMixer, field
from linrec.nn.parameters import mark
from linrec.rules import at_least, positive, require

__all__ = ["NoisyRNN"]


class NoisyRNN(SkewFieldMixer):
    """h_t = h + d * m_t * (A h + tanh(W h + U x_t + b)) + s_a n_t: the noise m_t and n_t is of training.

    | task of the paper, 128 channels | arguments |
    |---|---|
    | sequential and permuted sequential MNIST, less noise | the defaults |
    | both, more noise | `add_noise=0.05` |

    The settings are in the released code. Initial values too: M_A and M_W are normal with standard deviation
    `init_std` / d_model, and U and b are of torch's Linear. d is marked as group "transition" without weight
    decay. Noise is drawn before the first iteration, so all modes use the same noise. After `eval()`, the
    mixer is deterministic.

    Args:
        d_model: width of the sequence and of the state.
        epsilon: initial value of d.
        beta: from 0 for symmetric to 1 for antisymmetric matrices.
        gamma: damping of A and W.
        gamma_w: damping gamma_W of W; None is `gamma`.
        alpha: factor of A h; the ablation without A is 0.
        add_noise: standard deviation s_a of the added noise.
        mult_noise: s_m of the multiplied noise, from 0 to 1.
        init_std: scale of the initial M_A and M_W.
        mode: mode of `linrec.ops.nonlinear_scan`; "auto" is the loop.

    Raises:
        ValueError: a number is out of range, or the mode does not exist.

    Source:
        Lim and others, Noisy Recurrent Neural Networks (2021), and the released code.

    Example:
        >>> mixer = NoisyRNN(64)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 64]))
    """

    def __init__(
        self,
        d_model: int,
        *,
        epsilon: float = 0.01,
        beta: float = 0.75,
        gamma: float = 0.001,
        gamma_w: float | None = None,
        alpha: float = 1.0,
        add_noise: float = 0.02,
        mult_noise: float = 0.02,
        init_std: float = 0.1,
        mode: str = "auto",
    ) -> None:
        gamma_w = gamma if gamma_w is None else gamma_w
        super().__init__(
            d_model, beta=beta, gamma=gamma, gamma_w=gamma_w, alpha=alpha, init_std=init_std, mode=mode
        )
        positive(epsilon=epsilon)
        at_least(0, add_noise=add_noise)
        require(0 <= mult_noise <= 1, f"`mult_noise` must be in [0, 1]; got {mult_noise}.")
        self.add_noise, self.mult_noise = add_noise, mult_noise
        self.d = nn.Parameter(torch.full((d_model,), epsilon))
        mark(self, "d", float32=True)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return h of every step, and the last h (b, d_model)."""
        Ux = self.U(x)
        inputs = [Ux]
        if self.training and (self.add_noise or self.mult_noise):
            m, n = 1 - self.mult_noise * torch.rand_like(Ux), torch.randn_like(Ux)
            inputs += [m, self.add_noise * n]
        weights = *self.matrices(), self.d
        return self.nonlinear_scan(self._cell, torch.stack(inputs, 2), weights, state=state, reset=reset)

    def _cell(self, h: Tensor, inputs: Tensor, A: Tensor, W: Tensor, d: Tensor) -> Tensor:
        """Return h_t."""
        Ux, *noise = inputs.unbind(1)
        change = d * field(h, Ux, A, W)
        if not noise:
            return h + change
        m, added = noise
        return h + m * change + added
