"""Activations by name, modReLU, and complex numbers as pairs of real ones."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from jaxtyping import Complex, Float
from torch import Tensor
from torch.nn import functional

__all__ = ["ACTIVATIONS", "Activation", "complex_modrelu", "modrelu", "to_complex", "to_pairs"]

Activation = Callable[[Tensor], Tensor]


def _identity(x: Tensor) -> Tensor:
    return x


def _lecun_tanh(x: Tensor) -> Tensor:
    return 1.7159 * torch.tanh(0.666 * x)


def _squared_relu(x: Tensor) -> Tensor:
    return torch.relu(x).square()


ACTIVATIONS: Mapping[str, Activation] = {
    "elu": functional.elu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "identity": _identity,
    "leaky_relu": functional.leaky_relu,
    "lecun_tanh": _lecun_tanh,
    "none": _identity,
    "relu": functional.relu,
    "sigmoid": functional.sigmoid,
    "silu": functional.silu,
    "squared_relu": _squared_relu,
    "tanh": torch.tanh,
}
"""All activations; an argument accepts the names of its `Literal`."""


def modrelu(u: Float[Tensor, "*b n"], b: Float[Tensor, " n"]) -> Float[Tensor, "*b n"]:
    """Return sign(u) relu(|u| + b), which is 0 where u is.

    Source:
        Unitary Evolution Recurrent Neural Networks (Arjovsky, Shah and Bengio, 2016), for real numbers.
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
    """
    size = z.abs()
    return z * (torch.relu(size + b) / (size + eps))


def to_complex(pairs: Float[Tensor, "*b two_n"]) -> Complex[Tensor, "*b n"]:
    """Return the complex numbers whose real and imaginary parts alternate on the last axis."""
    # torch.export cannot trace a view in the body of a loop
    return torch.complex(pairs[..., ::2], pairs[..., 1::2])


def to_pairs(z: Complex[Tensor, "*b n"]) -> Float[Tensor, "*b two_n"]:
    """Return real and imaginary parts, in turn on the last axis."""
    return torch.view_as_real(z).flatten(-2)
