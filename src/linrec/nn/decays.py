"""Decays that are constants, one per head, and slopes of decays."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["alibi_slopes", "log_spaced_decay", "multi_scale_decay", "single_decay"]


def alibi_slopes(
    n_heads: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Float[Tensor, "h"]:
    """s_h = 2^(-8 h / H) for h = 1 .. H, where the number of heads H is a power of two.

    Otherwise the first P heads have the slopes of P heads, P the largest power of two below H. The other
    heads have the slopes 2^(-4 / P), 2^(-12 / P), .., every second one of 2 P heads.

    Args:
        n_heads: heads H.
        dtype: of the result; None is torch's default.
        device: of the result; None is torch's default.

    Source:
        Press, Smith and Lewis, Train Short, Test Long: Attention with Linear Biases (2022), and its code for
        other numbers of heads.

    Example:
        >>> alibi_slopes(3) * 256
        tensor([16.,  1., 64.])
    """
    power = 2 ** (n_heads.bit_length() - 1)
    head = torch.arange(n_heads, dtype=dtype or torch.get_default_dtype(), device=device)
    exponent = torch.where(head < power, 8 * (head + 1), 8 * (head - power) + 4)
    return 2.0 ** (-exponent / power)


def multi_scale_decay(
    n_heads: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Float[Tensor, "h"]:
    """log gamma, gamma = 1 - 2^(-5 - arange(0, h)): heads that forget over 32, 64, 128, ... steps.

    Args:
        n_heads: heads h.
        dtype: of the result; None is torch's default.
        device: of the result; None is torch's default.

    Source:
        RetNet (Sun and others, 2023), eq. 8.

    Example:
        >>> (1 / (1 - multi_scale_decay(3).exp())).round()
        tensor([ 32.,  64., 128.])
    """
    exponent = torch.arange(5, 5 + n_heads, dtype=dtype or torch.get_default_dtype(), device=device)
    return torch.log1p(-(2.0**-exponent))


def log_spaced_decay(
    n_heads: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Float[Tensor, "h"]:
    """log gamma, gamma = 1 - exp(linspace(log(1/32), log(1/512), h)): 32 to 512 steps, however many heads.

    Args:
        n_heads: heads h.
        dtype: of the result; None is torch's default.
        device: of the result; None is torch's default.

    Source:
        RetNet (Sun and others, 2023), section 3.1.

    Example:
        >>> (1 / (1 - log_spaced_decay(3).exp())).round()
        tensor([ 32., 128., 512.])
    """
    steps = torch.linspace(math.log(32), math.log(512), n_heads, dtype=dtype, device=device).exp()
    return torch.log1p(-1 / steps)


def single_decay(
    n_heads: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Float[Tensor, "h"]:
    """log gamma, gamma = 127/128 in all heads: they forget over 128 steps.

    Args:
        n_heads: heads h.
        dtype: of the result; None is torch's default.
        device: of the result; None is torch's default.

    Source:
        RetNet (Sun and others, 2023), section 3.6, the ablation without multi-scale decay.

    Example:
        >>> single_decay(2).exp() * 128
        tensor([127., 127.])
    """
    return torch.full((n_heads,), 127 / 128, dtype=dtype, device=device).log()
