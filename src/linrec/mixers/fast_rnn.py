"""FastRNN: a weighted residual connection (Kusupati, Singh, Bhatia, Kumar, Jain and Varma, 2018).

    h^_t = sigma(W x_t + U h_{t-1} + b)
    h_t = alpha h^_t + beta h_{t-1}

x is the input, t time, h the hidden state and output, sigma an activation, and alpha and beta two scalars.
With alpha near 0 and beta near 1 - alpha, gradients neither vanish nor explode.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from linrec.nn.activations import ACTIVATIONS
from linrec.nn.cells import LowRank, NonlinearMixer
from linrec.nn.mixer import State
from linrec.nn.parameters import mark
from linrec.rules import at_least

__all__ = ["FastRNN"]

Activation = Literal["tanh", "sigmoid", "relu"]


class FastRNN(NonlinearMixer):
    """h_t = alpha sigma(W x_t + U h_{t-1} + b) + beta h_{t-1}: a residual connection with learned scalars.

    alpha and beta are sigmoids of learned numbers, as in the released code. W and U start at Gaussian values
    of standard deviation 0.1, b at one, alpha at sigmoid(-3) = 0.047 and beta at sigmoid(3) = 0.953. The
    numbers behind alpha and beta are marked as group "transition" without weight decay. The paper also makes
    W and U sparse, by hard thresholds between updates, which are not here.

    Args:
        d_model: width of the sequence and of the state.
        activation: "tanh", "sigmoid" or "relu".
        w_rank: rank of W, a product of two matrices; None means a full matrix.
        u_rank: rank of U, as `w_rank`.
        alpha_init: initial logit of alpha.
        beta_init: initial logit of beta.
        mode: mode of `linrec.ops.nonlinear_scan`; "auto" is the loop.

    Raises:
        ValueError: an unknown activation or mode, or a rank below 1.

    Source:
        Kusupati and others, FastGRNN: A Fast, Accurate, Stable and Tiny Kilobyte Sized Gated Recurrent Neural
        Network (2018), its equations of FastRNN, and the released code, microsoft/EdgeML.

    Example:
        >>> mixer = FastRNN(64, u_rank=8)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 64]))
    """

    def __init__(
        self,
        d_model: int,
        *,
        activation: Activation = "tanh",
        w_rank: int | None = None,
        u_rank: int | None = None,
        alpha_init: float = -3.0,
        beta_init: float = 3.0,
        mode: str = "auto",
    ) -> None:
        super().__init__(d_model, mode)
        at_least(1, w_rank=w_rank, u_rank=u_rank, or_none=True, cure="None means a full matrix.")
        self.sigma = ACTIVATIONS[activation]

        self.W = LowRank(d_model, d_model, w_rank, std=0.1)
        self.U = LowRank(d_model, d_model, u_rank, std=0.1)
        self.b = nn.Parameter(torch.ones(d_model))
        # logits
        self.alpha = nn.Parameter(torch.full((1,), float(alpha_init)))
        self.beta = nn.Parameter(torch.full((1,), float(beta_init)))
        mark(self, "alpha", "beta", float32=True)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return h of every step, and the last h (b, d_model)."""
        scalars = torch.sigmoid(self.alpha), torch.sigmoid(self.beta)
        weights = *scalars, *self.U.weights(x.device)
        return self.nonlinear_scan(self._cell, self.W(x) + self.b, weights, state=state, reset=reset)

    def _cell(self, h: Tensor, Wx: Tensor, alpha: Tensor, beta: Tensor, *U: Tensor) -> Tensor:
        """Return h_t."""
        return alpha * self.sigma(Wx + self.U.product(h, *U)) + beta * h
