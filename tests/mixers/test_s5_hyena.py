"""S5-Hyena against its equations in float64; test_laws.py has the laws."""

import math

import pytest
import torch
from torch.nn import functional

from linrec.mixers import build
from linrec.mixers.s5_hyena import S5Hyena
from linrec.testing import assert_agree, generator

D = 4
CASES = {
    "released": {},
    "order 3": {"order": 3, "conv_size": None, "output": "half_glu"},
    "pairs": {"pairs": True, "activation": False},
}
every_case = pytest.mark.parametrize("case", CASES)


def make(d_model: int = D, **arguments) -> S5Hyena:
    torch.manual_seed(0)
    mixer = build("s5_hyena", d_model, **{"d_state": 8, "n_blocks": 2} | arguments)
    assert isinstance(mixer, S5Hyena)
    return mixer


def moved(mixer: S5Hyena) -> S5Hyena:
    """In float64, every parameter away from where it starts."""
    mixer = mixer.double()
    with torch.no_grad():
        for seed, parameter in enumerate(mixer.parameters()):
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator(seed), dtype=parameter.dtype)
    return mixer


def system_by_hand(s5, u):
    """The output of one system, step by step."""
    B, C = s5.B[0::2] + 1j * s5.B[1::2], s5.C[:, 0::2] - 1j * s5.C[:, 1::2]
    Lambda = -s5.A_log.exp() + 1j * s5.A_imag
    Lambdabar = torch.exp(Lambda * s5.dt_log.exp())
    Bbar = ((Lambdabar - 1) / Lambda)[:, None] * B
    h, outputs = torch.zeros(len(u), len(Lambda), dtype=torch.complex128), []
    for k in range(u.shape[1]):
        h = Lambdabar * h + (u[:, k] + 0j) @ Bbar.T
        outputs.append((2 if s5.pairs else 1) * (h @ C.T).real + s5.D * u[:, k])
    y = torch.stack(outputs, 1)
    if s5.activation:
        y = y * (1 + torch.erf(y / math.sqrt(2))) / 2
    return y * torch.sigmoid(s5.out(y)) if s5.output == "half_glu" else y


def by_hand(mixer, x):
    parts = mixer.inputs(x)
    if mixer.conv.present:
        taps = mixer.conv.weight.flip(1)[:, None]
        padded = functional.pad(parts.mT, (taps.shape[2] - 1, 0))
        parts = functional.conv1d(padded, taps, mixer.conv.bias, groups=len(taps)).mT
    v, *gates = parts.split(D, -1)
    for n, s5 in enumerate(mixer.systems):
        v = system_by_hand(s5, gates[n] * v)
    return mixer.out(gates[-1] * v)


@every_case
def test_the_layer_and_its_gradients_are_the_equations(case):
    mixer = moved(make(**CASES[case]))
    x = torch.randn(2, 11, D, generator=generator(), dtype=torch.float64).requires_grad_()
    ours, theirs = mixer(x)[0], by_hand(mixer, x)
    assert_agree(ours, theirs, "outputs")
    dy = torch.randn(ours.shape, generator=generator(2), dtype=ours.dtype)
    wanted = [x, *mixer.parameters()]
    assert_agree(torch.autograd.grad(ours, wanted, dy), torch.autograd.grad(theirs, wanted, dy))


def test_where_parameters_start():
    d = 200
    mixer = make(d, d_state=128, n_blocks=32, order=3).requires_grad_(False)
    for weight, inputs in ((mixer.inputs.weight, d), (mixer.conv.weight, 3)):
        std = 1 / math.sqrt(inputs)
        assert float(weight.std()) == pytest.approx(std, rel=0.05)
        assert float(weight.abs().max()) == pytest.approx(2 * std / 0.8796256610342398, rel=0.01)
    assert float(mixer.out.weight.std()) == pytest.approx(0.02, rel=0.05)
    assert not any(layer.bias.any() for layer in (mixer.inputs, mixer.conv, mixer.out))
    assert len(mixer.systems) == 2
    for s5 in mixer.systems:
        # of a complex number, both parts together
        assert float(s5.C.square().mean()) == pytest.approx(0.5, rel=0.05)
        assert s5.A_log.shape == (128,) and float(s5.A_log.exp().max()) == pytest.approx(0.5)
        # eigenvalues of a 4 by 4 block, 32 times
        assert len({round(float(a), 4) for a in s5.A_imag}) == 4


def test_errors():
    for message, arguments in {
        "`order` must be at least 2; got 1. There must be a system": {"order": 1},
        "`out_std` must be positive and finite; got 0": {"out_std": 0},
        "`d_state` must be a positive multiple of `n_blocks` = 2": {"d_state": 7},
        "there is no `output` 'gelu'": {"output": "gelu"},
    }.items():
        with pytest.raises(ValueError) as error:
            make(**arguments)
        assert message in str(error.value)
