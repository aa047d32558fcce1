"""LFM2's gated short convolution: LFM2 Technical Report (Liquid AI, 2025).

    B_t, C_t, v_t = W_in x_t
    h_t = sum_{j=0..L-1} w_j * (B_{t-j} * v_{t-j})
    y_t = W_out (C_t * h_t)

x input, B gate of the input, C gate of the output, v value, w taps of each channel, h filtered sequence, y
output, L number of taps, t time.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.mixer import Mixer, State
from linrec.nn.short_convolution import ShortConvolution
from linrec.ops.inspection import kernel_mixing
from linrec.rules import at_least

__all__ = ["LFM2"]


class LFM2(Mixer):
    """y_t = W_out (C_t * conv(B * v)_t): a convolution of a few steps between two gates.

    The layer sees L steps. LFM2's models have a few layers of attention among these layers, and no other
    recurrence: pass a pattern of mixers such as ("lfm2", "lfm2", "attention").

    Taps and all matrices start as torch draws them.

    Args:
        d_model: width of the sequence.
        conv_size: number L of taps.
        bias: whether the projections and the convolution have biases.

    Raises:
        ValueError: a `conv_size` below 1.

    Source:
        LFM2 Technical Report (2025), the short-range blocks. Sizes come from the released code.

    Example:
        >>> y, tail = LFM2(8)(torch.zeros(2, 10, 8))
        >>> y.shape, tail.shape
        (torch.Size([2, 10, 8]), torch.Size([2, 2, 8]))
    """

    recurrence = "short_conv"

    def __init__(self, d_model: int, *, conv_size: int = 3, bias: bool = False) -> None:
        super().__init__(d_model)
        at_least(1, conv_size=conv_size, cure="The released models have 3.")
        self.BCv = nn.Linear(d_model, 3 * d_model, bias=bias)
        self.conv = ShortConvolution(d_model, conv_size, bias=bias)
        self.out = nn.Linear(d_model, d_model, bias=bias)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y, and the last L - 1 of B * v (b, L - 1, d_model)."""
        B, C, v = self.BCv(x).chunk(3, dim=-1)
        h, tail = self.conv(B * v, state, reset=reset)
        return self.out((C * h).to(x.dtype)), tail

    def token_mixing(self, x: Tensor, *, reset: Tensor | None = None) -> Tensor:
        """Return the mean over channels of |C_n w_{n-m} B_m|."""
        B, C, _ = self.BCv(x).chunk(3, dim=-1)
        taps = functional.pad(self.conv.weight, (0, x.shape[1]))[:, : x.shape[1]]
        return kernel_mixing(taps, x, reset, torch.einsum("bnc,bmc->bcnm", C, B))
