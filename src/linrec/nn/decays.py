"""Decays that are constants, one per head."""

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["multi_scale_decay"]


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
