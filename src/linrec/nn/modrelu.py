"""modReLU: an activation that changes magnitudes and keeps signs or phases."""

import torch
from jaxtyping import Complex, Float
from torch import Tensor

__all__ = ["complex_modrelu", "modrelu"]


def modrelu(u: Float[Tensor, "*b n"], b: Float[Tensor, " n"]) -> Float[Tensor, "*b n"]:
    """Return sign(u) relu(|u| + b), which is 0 where u is.

    Source:
        Unitary Evolution Recurrent Neural Networks (Arjovsky, Shah and Bengio, 2016), for real numbers.

    Example:
        >>> modrelu(torch.tensor([-2.0, 0.5]), torch.tensor([-1.0, -1.0]))
        tensor([-1.,  0.])
    """
    return u.sign() * torch.relu(u.abs() + b)


def complex_modrelu(
    z: Complex[Tensor, "*b n"], b: Float[Tensor, " n"], *, eps: float = 1e-5
) -> Complex[Tensor, "*b n"]:
    """Return z relu(|z| + b) / (|z| + eps), which has a derivative at 0.

    Args:
        z: complex numbers of any magnitude, 0 included.
        b: real, added to the magnitudes. Where b is positive, the derivative at 0 is b / eps.
        eps: positive; 1e-5 in the released code.

    Source:
        Unitary Evolution Recurrent Neural Networks (Arjovsky, Shah and Bengio, 2016), and the released code.

    Example:
        >>> complex_modrelu(torch.tensor([-2j, 0.5]), torch.tensor([-1.0, -1.0])).abs()
        tensor([1.0000, 0.0000])
    """
    size = z.abs()
    return z * (torch.relu(size + b) / (size + eps))
