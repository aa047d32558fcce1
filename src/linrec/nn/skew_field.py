"""What the Lipschitz RNN and the Noisy RNN share: the right-hand side of their differential equation."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from linrec.nn.mixer import Mixer, State
from linrec.nn.skew import skewed
from linrec.ops.nonlinear_scan import nonlinear_scan
from linrec.rules import at_least, require

__all__ = ["SkewFieldMixer", "field"]


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


class SkewFieldMixer(Mixer):
    """A mixer of h' = alpha A h + tanh(W h + U x + b), with A and W between symmetric and antisymmetric.

    A subclass defines `mix` with `field` and `matrices`.

    Args:
        d_model: width of the sequence and of the state.
        beta: from 0 for symmetric to 1 for antisymmetric matrices.
        gamma: damping of A.
        gamma_w: damping of W.
        alpha: factor of A h.
        init_std: scale of the initial M_A and M_W, normal with standard deviation `init_std` / d_model.
        mode: mode of `linrec.ops.nonlinear_scan`.

    Raises:
        ValueError: a number is out of range, or the mode does not exist.
    """

    recurrence = "nonlinear_scan"

    def __init__(
        self,
        d_model: int,
        *,
        beta: float,
        gamma: float,
        gamma_w: float,
        alpha: float,
        init_std: float,
        mode: str,
    ) -> None:
        super().__init__(d_model)
        at_least(0, gamma=gamma, gamma_w=gamma_w, alpha=alpha, init_std=init_std)
        require(0 <= beta <= 1, f"`beta` must be in [0, 1]; got {beta}.")
        nonlinear_scan.operator.check_mode(mode)
        self.beta, self.gamma, self.gamma_w, self.alpha, self.mode = beta, gamma, gamma_w, alpha, mode

        self.U = nn.Linear(d_model, d_model)
        std = init_std / d_model
        self.M_A = nn.Parameter(std * torch.randn(d_model, d_model))
        self.M_W = nn.Parameter(std * torch.randn(d_model, d_model))

    def matrices(self) -> tuple[Tensor, Tensor]:
        """Return alpha A and W, in the dtype of the state."""
        dtype = self.state_dtype
        A = self.alpha * skewed(self.M_A.to(dtype), self.beta, self.gamma)
        return A, skewed(self.M_W.to(dtype), self.beta, self.gamma_w)

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> State:
        """Return zeros (batch, d_model)."""
        return torch.zeros(batch, self.d_model, **self.factory_kwargs(device))
