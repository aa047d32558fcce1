"""Channel mixing: functions applied to every step of the sequence alone."""

from typing import TYPE_CHECKING, Literal

from jaxtyping import Float
from torch import Tensor, nn

from linrec.nn.activations import ACTIVATIONS
from linrec.rules import choice

__all__ = ["FFNActivation", "FeedForward"]

FFNActivation = Literal["gelu", "squared_relu"]


class FeedForward(nn.Module):
    """y = W_2 f(W_1 x + b_1) + b_2; with f = GELU, the "simple FNN" of GateLoop's appendix C.

    Args:
        d_model: width of input and output.
        d_hidden: width between the two projections, `d_channel_mixing` in the paper's tables.
        activation: f, "gelu", or "squared_relu", which is ReLU(z)^2.
        bias: whether there are b_1 and b_2.

    Raises:
        ValueError: there is no such activation; the message names the nearest.

    Source:
        "squared_relu": So and others, Primer (2021).

    Example:
        >>> import torch
        >>> FeedForward(64, 128)(torch.zeros(2, 5, 64)).shape
        torch.Size([2, 5, 64])
    """

    def __init__(
        self, d_model: int, d_hidden: int, *, activation: FFNActivation = "gelu", bias: bool = True
    ) -> None:
        super().__init__()
        choice(FFNActivation, activation=activation)
        self.activation = activation
        self.up = nn.Linear(d_model, d_hidden, bias=bias)
        self.down = nn.Linear(d_hidden, d_model, bias=bias)

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Apply the function to `x` (..., d_model)."""
        return self.down(ACTIVATIONS[self.activation](self.up(x)))

    if TYPE_CHECKING:
        __call__ = forward
