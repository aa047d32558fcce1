"""The gates of a gated recurrent unit, for cells whose state changes before the unit."""

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["gru_gates"]


def gru_gates(
    Wx: Float[Tensor, "*b three_n"], h: Float[Tensor, "*b n"], U: Float[Tensor, "three_n n"]
) -> tuple[Float[Tensor, "*b n"], Float[Tensor, "*b n"]]:
    """Return the gate and the new content of a GRU.

        z, r = sigmoid(W_zr x + U_zr h)    n = tanh(W_n x + U_n (r * h))

    Args:
        Wx: W x with biases, of z, r and n.
        h: the state that the unit reads.
        U: weights of the state, of z, r and n.

    Returns:
        z and n, in the shape of h.

    Source:
        Cho and others, Learning Phrase Representations using RNN Encoder-Decoder (2014).

    Example:
        >>> z, n = gru_gates(torch.zeros(2, 12), torch.ones(2, 4), torch.zeros(12, 4))
        >>> z.shape, float(z[0, 0]), float(n[0, 0])
        (torch.Size([2, 4]), 0.5, 0.0)
    """
    of_z, of_r, of_n = Wx.chunk(3, -1)
    U_z, U_r, U_n = U.chunk(3)
    z, r = torch.sigmoid(of_z + h @ U_z.mT), torch.sigmoid(of_r + h @ U_r.mT)
    return z, torch.tanh(of_n + (r * h) @ U_n.mT)
