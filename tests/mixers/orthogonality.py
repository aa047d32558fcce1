"""Training steps after which the matrix of a mixer must still be orthogonal."""

from typing import TypeVar

import torch
from torch import nn

from linrec.testing import generator

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def trained(mixer: ModuleT, steps: int = 20) -> ModuleT:
    """Return the mixer after large steps of RMSprop on all parameters, towards a random output."""
    x = torch.randn(4, 10, mixer.d_model, generator=generator(0))
    target = torch.randn(x.shape, generator=generator(1))
    optimizer = torch.optim.RMSprop(mixer.parameters(), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        (mixer(x)[0] - target).square().mean().backward()
        optimizer.step()
    return mixer
