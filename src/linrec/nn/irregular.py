"""Irregular steps of cells of `nonlinear_scan`."""

import torch
from jaxtyping import Float
from torch import Tensor

from linrec.ops.core.precision import wide

__all__ = ["beside_times"]


def beside_times(x: Float[Tensor, "b t d"], dt: Float[Tensor, "b t"] | None) -> Float[Tensor, "b t more"]:
    """Return inputs of a cell with the time of each step as a further channel, the last.

    The result is in float32, or float64 where `x` is, because half precision would round the times.

    Args:
        x: inputs (b, t, d).
        dt: time since the step before (b, t); None is 1 everywhere.

    Example:
        >>> beside_times(torch.zeros(1, 2, 1), torch.tensor([[1.0, 0.5]])).tolist()
        [[[0.0, 1.0], [0.0, 0.5]]]
    """
    x = wide(x)
    times = torch.ones_like(x[..., :1]) if dt is None else dt.to(x.dtype)[..., None]
    return torch.cat([x, times], -1)
