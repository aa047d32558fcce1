"""Channel mixing: functions applied to every step of the sequence alone."""

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["FeedForward"]


class FeedForward(nn.Module):
    """y = W_2 GELU(W_1 x + b_1) + b_2, the "simple FNN" of GateLoop's appendix C.

    Args:
        d_model: width of input and output.
        d_hidden: width between the two projections, `d_channel_mixing` in the paper's tables.

    Example:
        >>> import torch
        >>> FeedForward(64, 128)(torch.zeros(2, 5, 64)).shape
        torch.Size([2, 5, 64])
    """

    def __init__(self, d_model: int, d_hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, d_hidden)
        self.down = nn.Linear(d_hidden, d_model)

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Apply the function to `x` (..., d_model)."""
        return self.down(functional.gelu(self.up(x)))
