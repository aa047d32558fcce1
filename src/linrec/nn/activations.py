"""Activations by name."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["ACTIVATIONS", "Activation"]

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
