"""FastGRNN: one matrix for the gate and the content (Kusupati, Singh, Bhatia, Kumar, Jain and Varma, 2018).

    z_t = sigma_z(W x_t + U h_{t-1} + b_z)
    h^_t = sigma(W x_t + U h_{t-1} + b)
    h_t = (zeta (1 - z_t) + nu) * h^_t + z_t * h_{t-1}

x is the input, t time, h the hidden state and output, z a gate, sigma and sigma_z activations, and zeta and
nu two scalars. The gate and h^ have the same matrices, and biases of their own.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from linrec.nn.activations import ACTIVATIONS
from linrec.nn.cells import LowRank, NonlinearMixer
from linrec.nn.mixer import State
from linrec.nn.parameters import mark
from linrec.rules import at_least, require

__all__ = ["FastGRNN"]

Activation = Literal["tanh", "sigmoid", "relu"]


class FastGRNN(NonlinearMixer):
    """h_t = (zeta (1 - z_t) + nu) * h^_t + z_t * h_{t-1}: a gate z_t that costs no matrices.

    zeta and nu are sigmoids of learned numbers. As in the released code, W and U start at Gaussian values of
    standard deviation 0.1, both biases at one, zeta at sigmoid(1) = 0.73 and nu at sigmoid(-4) = 0.018. The
    numbers behind zeta and nu are marked as group "transition" without weight decay. The paper also makes
    W and U sparse, by hard thresholds between updates, which are not here.

    Args:
        d_model: width of the sequence and of the state.
        activation: sigma, "tanh", "sigmoid" or "relu".
        gate_activation: sigma_z, as `activation`.
        w_rank: rank of W, a product of two matrices; None means a full matrix.
        u_rank: rank of U, as `w_rank`.
        zeta_init: initial logit of zeta.
        nu_init: initial logit of nu.
        mode: mode of `linrec.ops.nonlinear_scan`; "auto" is the loop.

    Raises:
        ValueError: an unknown activation or mode, or a rank below 1.

    Source:
        Kusupati and others, FastGRNN: A Fast, Accurate, Stable and Tiny Kilobyte Sized Gated Recurrent Neural
        Network (2018), its equations of FastGRNN, and the released code, microsoft/EdgeML.

    Example:
        >>> mixer = FastGRNN(64, u_rank=8)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 64]))
    """

    def __init__(
        self,
        d_model: int,
        *,
        activation: Activation = "tanh",
        gate_activation: Activation = "sigmoid",
        w_rank: int | None = None,
        u_rank: int | None = None,
        zeta_init: float = 1.0,
        nu_init: float = -4.0,
        mode: str = "auto",
    ) -> None:
        super().__init__(d_model, mode)
        require(
            (activation, gate_activation) != ("relu", "relu"),
            "`activation` and `gate_activation` must not both be 'relu': without a bound on either, states "
            "overflow within a few steps. Choose 'sigmoid' for the gate.",
        )
        at_least(1, w_rank=w_rank, u_rank=u_rank, or_none=True, cure="None means a full matrix.")
        self.sigma, self.sigma_z = ACTIVATIONS[activation], ACTIVATIONS[gate_activation]

        self.W = LowRank(d_model, d_model, w_rank, std=0.1)
        self.U = LowRank(d_model, d_model, u_rank, std=0.1)
        self.b = nn.Parameter(torch.ones(d_model))
        self.b_z = nn.Parameter(torch.ones(d_model))
        # logits
        self.zeta = nn.Parameter(torch.full((1,), float(zeta_init)))
        self.nu = nn.Parameter(torch.full((1,), float(nu_init)))
        mark(self, "zeta", "nu", float32=True)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return h of every step, and the last h (b, d_model)."""
        scalars = torch.sigmoid(self.zeta), torch.sigmoid(self.nu)
        weights = self.b_z, self.b, *scalars, *self.U.weights(x.device)
        return self.nonlinear_scan(self._cell, self.W(x), weights, state=state, reset=reset)

    def _cell(
        self, h: Tensor, Wx: Tensor, b_z: Tensor, b: Tensor, zeta: Tensor, nu: Tensor, *U: Tensor
    ) -> Tensor:
        """Return h_t."""
        both = Wx + self.U.product(h, *U)
        z, new = self.sigma_z(both + b_z), self.sigma(both + b)
        return (zeta * (1 - z) + nu) * new + z * h
