"""Biases of attention scores by distance: b_i for pairs of steps that are i steps apart."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from linrec.nn.parameters import mark
from linrec.nn.rotary import Rotary

__all__ = ["RotaryBias", "StandardizedBias", "ToeplitzBias"]


class ToeplitzBias(nn.Module):
    """b_i = w_i for i = 0 .. size - 1, a learned number for each distance.

    Args:
        size: distances.
        std: standard deviation of w when training starts.

    Example:
        >>> ToeplitzBias(4, std=0.02)().shape
        torch.Size([4])
    """

    def __init__(self, size: int, *, std: float) -> None:
        super().__init__()
        self.w = nn.Parameter(std * torch.randn(size))

    def forward(self) -> Float[Tensor, "size"]:
        """Return the biases of all distances."""
        return self.w


class RotaryBias(nn.Module):
    """b_i = (R_0 a) . (R_i b) for i = 0 .. size - 1, of learned a and b, whose pairs of channels turn.

    Args:
        size: distances.
        d: channels of a and b, even.
        base: of the frequencies; see `linrec.nn.Rotary`.
        std: standard deviation of a and b when training starts.

    Source:
        Hua, Dai, Liu and Le, Transformer Quality in Linear Time (2022), its relative position bias from 512
        steps on.

    Example:
        >>> RotaryBias(4, 6, std=0.02)().shape
        torch.Size([4])
    """

    def __init__(self, size: int, d: int, *, base: float = 10_000.0, std: float) -> None:
        super().__init__()
        self.size, self.rotary = size, Rotary(d, base=base)
        self.a = nn.Parameter(std * torch.randn(d))
        self.b = nn.Parameter(std * torch.randn(d))

    def forward(self) -> Float[Tensor, "size"]:
        """Return the biases of all distances."""
        distance = torch.arange(self.size, device=self.b.device)[None]
        (turned,) = self.rotary(distance, self.b.expand(1, self.size, 1, -1))
        return turned[0, :, 0] @ self.a


class StandardizedBias(nn.Module):
    """w = gamma (u - mean(u)) / std(u) + beta, a learned number for each distance of each head.

    Mean and standard deviation are over the numbers of a head. u is normal when training starts, gamma and
    beta are zero, and so is w.

    Args:
        n_heads: heads h.
        size: distances s, at least 2.

    Source:
        An Attention Free Transformer (Zhai and others, 2021), the reparameterization of AFT-conv.

    Example:
        >>> StandardizedBias(2, 4)(dtype=torch.float32).abs().max().item()
        0.0
    """

    def __init__(self, n_heads: int, size: int) -> None:
        super().__init__()
        self.u = nn.Parameter(torch.randn(n_heads, size))
        self.gamma = nn.Parameter(torch.zeros(n_heads))
        self.beta = nn.Parameter(torch.zeros(n_heads))
        mark(self, group="channel", weight_decay=False)

    def forward(self, *, dtype: torch.dtype) -> Float[Tensor, "h size"]:
        """Return the biases of all distances in a dtype."""
        deviation, mean = torch.std_mean(self.u.to(dtype), -1, correction=0, keepdim=True)
        scaled = self.gamma.to(dtype)[:, None] * (self.u.to(dtype) - mean) / deviation
        return scaled + self.beta.to(dtype)[:, None]
