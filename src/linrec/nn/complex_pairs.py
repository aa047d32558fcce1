"""Complex numbers as pairs of real numbers, which linear layers and `nonlinear_scan` take."""

import torch
from jaxtyping import Complex, Float
from torch import Tensor

__all__ = ["to_complex", "to_pairs"]


def to_complex(pairs: Float[Tensor, "*b two_n"]) -> Complex[Tensor, "*b n"]:
    """Return the complex numbers whose real and imaginary parts alternate on the last axis.

    Example:
        >>> to_complex(torch.tensor([1.0, 2.0, 0.0, -1.0]))
        tensor([1.+2.j, 0.-1.j])
    """
    # torch.export cannot trace a view in the body of a loop
    return torch.complex(pairs[..., ::2], pairs[..., 1::2])


def to_pairs(z: Complex[Tensor, "*b n"]) -> Float[Tensor, "*b two_n"]:
    """Return real and imaginary parts, in turn on the last axis.

    Example:
        >>> to_pairs(torch.tensor([1 + 2j, -1j]))
        tensor([ 1.,  2., -0., -1.])
    """
    return torch.view_as_real(z).flatten(-2)
