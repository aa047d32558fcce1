"""BaseConv, the gated short convolution of BASED (Arora and others, 2024).

    u_t, g_t = W_in x_t
    h_t = SiLU(sum_{j=0..L-1} w_j * u_{t-j})
    y_t = W_out (h_t * g_t)

x input, u the filtered half, g the gate, w taps of each channel, h filtered sequence, y output, L number of
taps, t time.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.mixer import Mixer, State
from linrec.nn.short_convolution import ShortConvolution
from linrec.ops.inspection import kernel_mixing
from linrec.ops.short_conv import short_conv
from linrec.rules import at_least

__all__ = ["BaseConv"]


class BaseConv(Mixer):
    """y_t = W_out (SiLU(conv(u))_t * g_t): a convolution of a few steps, gated by the input.

    The layer sees L steps. BASED's models have layers of `linear_attention(feature_map="taylor")` and of
    `attention` with a window among these layers: the preset `based`.

    Taps and all matrices start as torch draws them.

    Args:
        d_model: width of the sequence.
        expand: width of u and g, in multiples of `d_model`.
        conv_size: number L of taps.
        bias: whether the projections have biases.

    Raises:
        ValueError: an `expand` or a `conv_size` below 1.

    Source:
        Simple linear attention language models balance the recall-throughput tradeoff (Arora and others,
        2024), and its released code, which has the SiLU; Zoology (Arora and others, 2023) for BaseConv.

    Example:
        >>> y, tail = BaseConv(8)(torch.zeros(2, 10, 8))
        >>> y.shape, tail.shape
        (torch.Size([2, 10, 8]), torch.Size([2, 2, 16]))
    """

    recurrence = "short_conv"

    def __init__(self, d_model: int, *, expand: int = 2, conv_size: int = 3, bias: bool = True) -> None:
        super().__init__(d_model)
        at_least(1, expand=expand)
        at_least(1, conv_size=conv_size, cure="The released models have 3.")
        d_inner = expand * d_model
        self.ug = nn.Linear(d_model, 2 * d_inner, bias=bias)
        self.conv = ShortConvolution(d_inner, conv_size, silu=True)
        self.out = nn.Linear(d_inner, d_model, bias=bias)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y, and the last L - 1 of u (b, L - 1, `expand` d_model)."""
        u, g = self.ug(x).chunk(2, dim=-1)
        h, tail = self.conv(u, state, reset=reset)
        return self.out((h * g).to(x.dtype)), tail

    def token_mixing(self, x: Tensor, *, reset: Tensor | None = None) -> Tensor:
        """Return the mean over channels of |sigmoid(z_n) g_n w_{n-m}|, the factors of u, with h = SiLU(z)."""
        u, g = self.ug(x).chunk(2, dim=-1)
        gate = torch.sigmoid(short_conv(u, self.conv.weight, reset=reset)[0]) * g
        taps = functional.pad(self.conv.weight, (0, x.shape[1]))[:, : x.shape[1]]
        return kernel_mixing(taps, x, reset, torch.einsum("bnc,bmc->bcnm", gate, torch.ones_like(gate)))
