"""GRU-D: Recurrent Neural Networks for Multivariate Time Series with Missing Values (Che and others, 2018).

    gamma_t = exp(-max(0, W_gamma delta_t + b_gamma)),   h^_t = gamma_t * h_{t-1}
    z_t, r_t = sigmoid(W_zr x^_t + U_zr h^_t + V_zr m_t + b_zr)
    h~_t = tanh(W_h x^_t + U_h (r_t * h^_t) + V_h m_t + b_h)
    h_t = (1 - z_t) * h^_t + z_t * h~_t

With missing values, where m_t is 1 for each input that is observed and 0 for the others:

    delta_t = dt_t + (1 - m_{t-1}) * delta_{t-1},   beta_t = exp(-max(0, w_beta * delta_t + b_beta))
    x^_t = m_t * x_t + (1 - m_t) * (beta_t * x'_t + (1 - beta_t) * mean)

x is the input, t time, dt the time since the step before, and h the hidden state and output. delta is the
time since each input was observed, x' its value then, and mean its mean. gamma and beta are the decays of the
state and of the inputs, z and r the gates of a GRU. Without missing values, x^ is x, delta is dt, and V is
absent.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.cells import NonlinearMixer, beside_times, gru_gates
from linrec.nn.mixer import State
from linrec.nn.projections import affine_map, matrix
from linrec.rules import require

__all__ = ["GRUD"]


class GRUD(NonlinearMixer):
    """h^_t = exp(-max(0, W delta_t + b)) * h_{t-1}, h_t = GRU(x^_t, h^_t): a state that decays with time.

    With irregular steps, `dt` is the time in the decays. Without them, it is 1.

    With `missing`, the first half of the channels of x are the inputs, and the second half is their mask m of
    0 and 1. An input whose mask is 0 may have any finite value, such as 0. Before its first observation, an
    input is its mean. The buffer `mean` is zero, for standardised inputs. Set it to the means of the training
    data otherwise. The state has h, x' - mean, and (1 - m) * delta of the last step.

    W and V start Xavier-uniform, U orthogonal and b at zero, as in the released code. Each is one matrix for
    both gates and h~. The decays start uniform, as in torch's Linear: the zeros of the released code have no
    gradient.

    Args:
        d_model: width of the sequence and of h.
        missing: whether the second half of the channels of x is a mask.
        keep_decayed: whether h_t keeps h^_t, as in the paper. The released code keeps h_{t-1} in its place.
        mode: mode of `linrec.ops.nonlinear_scan`; "auto" is the loop.

    Raises:
        ValueError: `d_model` is odd with `missing`, or the mode does not exist.

    Source:
        Che and others, Recurrent Neural Networks for Multivariate Time Series with Missing Values (2018), and
        the released code, PeterChe1990/GRU-D.

    Example:
        >>> values, mask = torch.randn(2, 10, 8), torch.ones(2, 10, 8)
        >>> mixer = GRUD(16, missing=True)
        >>> y, state = mixer(torch.cat([values, mask], -1), dt=torch.rand(2, 10))
        >>> y.shape, state.shape
        (torch.Size([2, 10, 16]), torch.Size([2, 32]))
    """

    takes_dt = True
    mean: Tensor

    def __init__(
        self, d_model: int, *, missing: bool = False, keep_decayed: bool = True, mode: str = "auto"
    ) -> None:
        super().__init__(d_model, mode, (2 if missing else 1) * d_model)
        require(
            not missing or d_model % 2 == 0,
            f"`d_model` must be even with `missing=True`, for inputs and their mask; got {d_model}.",
        )
        self.missing, self.keep_decayed = missing, keep_decayed

        n = d_model // 2 if missing else d_model
        self.W = nn.Linear(n, 3 * d_model)
        self.U = nn.Linear(d_model, 3 * d_model, bias=False)
        self.gamma = nn.Linear(n if missing else 1, d_model)
        nn.init.xavier_uniform_(self.W.weight)
        nn.init.zeros_(self.W.bias)
        nn.init.orthogonal_(self.U.weight)
        if missing:
            self.V = nn.Linear(n, 3 * d_model, bias=False)
            nn.init.xavier_uniform_(self.V.weight)
            # of one input each, as `torch.nn.Linear(1, 1)`
            self.w_beta, self.b_beta = (nn.Parameter(torch.empty(n).uniform_(-1, 1)) for _ in range(2))
            self.register_buffer("mean", torch.zeros(n))

    def mix(
        self, x: Tensor, state: State, reset: Tensor | None, dt: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Return h of every step, and the last state (b, d_model); with `missing`, (b, 2 d_model)."""
        n = self.d_model // 2 if self.missing else 1
        weights = [matrix(self.U, self.d_model, x.device), *affine_map(self.gamma, n, x.device)]
        if self.missing:
            weights += [
                *affine_map(self.W, n, x.device),
                matrix(self.V, n, x.device),
                self.w_beta,
                self.b_beta,
                self.mean,
            ]
        inputs = beside_times(x if self.missing else self.W(x), dt)
        cell = self._with_missing_values if self.missing else self._cell
        h, state = self.nonlinear_scan(cell, inputs, weights, state=state, reset=reset)
        return h[..., : self.d_model].to(x.dtype), state

    def _with_missing_values(
        self,
        state: Tensor,
        inputs: Tensor,
        U: Tensor,
        W_gamma: Tensor,
        b_gamma: Tensor,
        W: Tensor,
        b: Tensor,
        V: Tensor,
        w_beta: Tensor,
        b_beta: Tensor,
        mean: Tensor,
    ) -> Tensor:
        """Return h_t, x'_{t+1} - mean and (1 - m_t) * delta_t, joined."""
        n = self.d_model // 2
        h, last, since = state.split([self.d_model, n, n], -1)
        x, m, dt = inputs.split([n, n, 1], -1)
        m = m.clamp(0, 1)
        delta = dt + since
        beta = torch.exp(-torch.relu(w_beta * delta + b_beta))
        imputed = m * x + (1 - m) * (mean + beta * last)
        driven = functional.linear(imputed, W, b) + m @ V.mT
        h = self._cell(h, torch.cat([driven, delta], -1), U, W_gamma, b_gamma)
        return torch.cat([h, m * (x - mean) + (1 - m) * last, (1 - m) * delta], -1)

    def _cell(self, h: Tensor, inputs: Tensor, U: Tensor, W_gamma: Tensor, b_gamma: Tensor) -> Tensor:
        """Return h_t from W x^_t + V m_t + b, joined with delta_t."""
        driven, delta = inputs[..., : 3 * self.d_model], inputs[..., 3 * self.d_model :]
        decayed = torch.exp(-torch.relu(functional.linear(delta, W_gamma, b_gamma))) * h
        z, content = gru_gates(driven, decayed, U)
        return (1 - z) * (decayed if self.keep_decayed else h) + z * content
