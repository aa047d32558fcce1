"""Damped moving averages of every channel: the numbers that they are made of."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from linrec.nn.parameters import Float32Module, mark
from linrec.rules import at_least

__all__ = ["MovingAverage"]

# of the released code: standard deviations of beta, and of the logits of alpha and delta
STD = 0.02
GATE_STD = 0.2


class MovingAverage(Float32Module):
    """h_t = alpha * beta * x_t + (1 - alpha * delta) * h_{t-1}, y_t = eta^T h_t: n averages of every channel.

    alpha and delta are sigmoids of normal numbers when training starts, with a standard deviation of 0.2;
    beta is 1, -1, 1, .. with one of 0.02, eta normal with variance 1 / n. All but eta are marked as group
    "transition" without weight decay.

    Args:
        channels: channels d.
        n_averages: averages n of each.

    Raises:
        ValueError: an `n_averages` below 1.

    Source:
        Mega (Ma and others, 2022), its multi-dimensional damped moving average; where numbers start is the
        released code's.

    Example:
        >>> from linrec.ops import diagonal_ssm
        >>> y, state = diagonal_ssm(torch.zeros(2, 10, 8), *MovingAverage(8, 4)())
        >>> y.shape, state.shape
        (torch.Size([2, 10, 8]), torch.Size([2, 8, 4]))
    """

    def __init__(self, channels: int, n_averages: int) -> None:
        super().__init__()
        at_least(1, n_averages=n_averages, cure="The paper's is 16.")
        shape = channels, n_averages
        self.alpha = nn.Parameter(GATE_STD * torch.randn(shape))
        self.delta = nn.Parameter(GATE_STD * torch.randn(shape))
        sign = 1.0 - 2.0 * (torch.arange(n_averages) % 2)
        self.beta = nn.Parameter(sign + STD * torch.randn(shape))
        self.eta = nn.Parameter(torch.randn(shape) / math.sqrt(n_averages))
        mark(self, "beta")
        mark(self, "alpha", "delta", float32=True)
        mark(self, "eta", group="channel", weight_decay=True)

    def forward(self) -> tuple[Float[Tensor, "d n"], Float[Tensor, "d n"], Float[Tensor, "d n"]]:
        """Return 1 - alpha * delta, alpha * beta and eta, in float32 or better."""
        dtype = self.state_dtype
        alpha, delta = torch.sigmoid(self.alpha.to(dtype)), torch.sigmoid(self.delta.to(dtype))
        return 1 - alpha * delta, alpha * self.beta.to(dtype), self.eta.to(dtype)
