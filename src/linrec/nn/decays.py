"""Decays that are constants, one per head."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["log_spaced_decay", "multi_scale_decay", "single_decay"]


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
