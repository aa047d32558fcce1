"""modReLU: an activation that changes magnitudes and keeps signs."""

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["modrelu"]


def modrelu(u: Float[Tensor, "*b n"], b: Float[Tensor, " n"]) -> Float[Tensor, "*b n"]:
    """Return sign(u) relu(|u| + b), which is 0 where u is.

    Source:
        Unitary Evolution Recurrent Neural Networks (Arjovsky, Shah and Bengio, 2016), for real numbers.

    Example:
        >>> modrelu(torch.tensor([-2.0, 0.5]), torch.tensor([-1.0, -1.0]))
        tensor([-1.,  0.])
    """
    return u.sign() * torch.relu(u.abs() + b)
