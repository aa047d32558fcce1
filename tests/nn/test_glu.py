import math

import pytest
import torch

from linrec.nn import GLU
from linrec.testing import assert_agree, generator

ACTIVATIONS = {
    "sigmoid": lambda z: 1 / (1 + (-z).exp()),
    "silu": lambda z: z / (1 + (-z).exp()),
    "gelu": lambda z: z * (1 + torch.erf(z / math.sqrt(2))) / 2,
    "gelu_tanh": lambda z: z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) / 2,
    "identity": lambda z: z,
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_glu_is_its_equation(activation):
    torch.manual_seed(0)
    glu = GLU(4, 7, activation=activation).double()
    x = torch.randn(2, 3, 4, generator=generator(), dtype=torch.float64)
    gate = ACTIVATIONS[activation](x @ glu.gate.weight.T + glu.gate.bias)
    hidden = gate * (x @ glu.up.weight.T + glu.up.bias)
    assert_agree(glu(x), hidden @ glu.down.weight.T + glu.down.bias)
    assert sum(p.numel() for p in glu.parameters()) == 3 * 4 * 7 + 2 * 7 + 4


def test_the_default_is_the_unit_of_that_name():
    assert GLU(4, 7).activation == "sigmoid"


def test_an_unknown_activation_gives_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'sigmoid'"):
        GLU(4, 7, activation="sigmod")
