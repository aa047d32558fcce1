"""What the tests of fast-weight programmers share: small inputs, resets, and a comparison with equations."""

from typing import Any

import torch
from torch import Tensor

from linrec.mixers import Mixer
from linrec.testing import assert_agree, generator

D, TIME = 6, 7


def inputs() -> Tensor:
    """Two short sequences in double precision."""
    return torch.randn(2, TIME, D, generator=generator(), dtype=torch.float64)


def resets() -> Tensor:
    """A reset in one sequence, and two that follow each other in the other."""
    reset = torch.zeros(2, TIME, dtype=torch.bool)
    reset[0, 3] = reset[1, 1] = reset[1, 2] = True
    return reset


def check_equations(mixer: Mixer, x: Tensor, reset: Tensor, expected: Tensor, states: Any) -> None:
    """Compare outputs, states and all gradients with those of the equations."""
    y, state = mixer(x, reset=reset)
    assert_agree(y, expected)
    assert_agree(state, states)
    wanted = [x, *mixer.parameters()]
    cotangent = torch.randn(y.shape, generator=generator(1), dtype=torch.float64)
    assert_agree(torch.autograd.grad(y, wanted, cotangent), torch.autograd.grad(expected, wanted, cotangent))
