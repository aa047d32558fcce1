"""The head of a classifier that judges two sequences together."""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from linrec.nn.parameters import mark

__all__ = ["PairHead"]


class PairHead(nn.Module):
    """outputs = W_2 relu(W_1 [u, v, u v, u - v] + b_1) + b_2, of the encodings u and v of two sequences.

    The hidden layer is as wide as an encoding.

    Args:
        d_model: width of the encodings.
        n_outputs: classes, or values of a regression.

    Source:
        Long Range Arena (Tay et al., 2020), section 2.2.3: encodings that one model makes of both sequences,
        apart from each other; the four parts come from its code, the single hidden layer from S4's.

    Example:
        >>> PairHead(64, 2)(torch.zeros(5, 2, 64)).shape
        torch.Size([5, 2])
    """

    def __init__(self, d_model: int, n_outputs: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(4 * d_model, d_model)
        self.output = mark(nn.Linear(d_model, n_outputs), group="vocabulary", weight_decay=True)

    def forward(self, encodings: Float[Tensor, "b 2 d_model"]) -> Float[Tensor, "b n_outputs"]:
        """Outputs of each pair."""
        u, v = encodings.unbind(1)
        return self.output(torch.relu(self.hidden(torch.cat([u, v, u * v, u - v], dim=-1))))

    if TYPE_CHECKING:
        __call__ = forward
