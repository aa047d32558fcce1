"""Projections with initialisations of their own, and the dtype of what projections return."""

from typing import Any

import torch
from torch import nn

__all__ = ["orthogonal_linear", "output_kwargs", "xavier_linear"]


def xavier_linear(d_in: int, d_out: int, *, gain: float = 1.0, bias: bool = False) -> nn.Linear:
    """y = W x + b, entries of W uniform in +- gain sqrt(6 / (d_in + d_out)), b zero.

    Args:
        d_in: width of the input.
        d_out: width of the output.
        gain: factor on the bound.
        bias: whether there is a b.

    Source:
        Glorot and Bengio (2010), eq. 16.

    Example:
        >>> bool(xavier_linear(3, 3, gain=0.5).weight.abs().max() <= 0.5)
        True
    """
    linear = nn.Linear(d_in, d_out, bias=bias)
    nn.init.xavier_uniform_(linear.weight, gain=gain)
    if bias:
        nn.init.zeros_(linear.bias)
    return linear


def orthogonal_linear(d_in: int, d_out: int, *, gain: float = 1.0) -> nn.Linear:
    """y = W x, with the rows of W, or its columns where they are fewer, orthogonal and of length `gain`.

    Args:
        d_in: width of the input.
        d_out: width of the output.
        gain: length of the rows or columns; 0 makes a W of zeros.

    Source:
        Saxe, McClelland and Ganguli, Exact Solutions to the Nonlinear Dynamics of Learning in Deep Linear
        Neural Networks (2013).

    Example:
        >>> W = orthogonal_linear(4, 2, gain=3.0).weight
        >>> (W @ W.T).abs().round().tolist()
        [[9.0, 0.0], [0.0, 9.0]]
    """
    linear = nn.Linear(d_in, d_out, bias=False)
    if gain == 0:
        nn.init.zeros_(linear.weight)
    else:
        nn.init.orthogonal_(linear.weight, gain=gain)
    return linear


def output_kwargs(linear: nn.Linear, device: torch.device | str | None = None) -> dict[str, Any]:
    """Return the dtype and the device of the outputs of a projection, for caches that keep the outputs.

    The dtype is the weight's, or autocast's within `torch.autocast`, which leaves float64 as it is.

    Args:
        linear: the projection.
        device: where the outputs live; None is where the weight lives.

    Example:
        >>> linear = nn.Linear(1, 1)
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     output_kwargs(linear)["dtype"] == linear(torch.ones(1)).dtype == torch.bfloat16
        True
    """
    dtype = linear.weight.dtype
    device = linear.weight.device if device is None else torch.device(device)
    # "meta" has no autocast
    if device.type != "meta" and dtype != torch.float64 and torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    return {"dtype": dtype, "device": device}
