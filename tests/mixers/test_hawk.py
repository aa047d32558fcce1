"""Hawk's block against its equations in float64; test_laws.py has the laws."""

import math

import pytest
import torch

from linrec.mixers import build
from linrec.mixers.hawk import Hawk
from linrec.testing import assert_agree, generator

D, TIME = 6, 9
CASES = {
    "paper": {},
    "released": {"d_rnn": 4, "n_blocks": 2, "variant": "released"},
    "two taps": {"conv_size": 2, "c": 3.0},
    "no convolution": {"conv_size": None},
}


def make(d_model: int = D, **arguments) -> Hawk:
    torch.manual_seed(0)
    mixer = build("hawk", d_model, **arguments)
    assert isinstance(mixer, Hawk)
    return mixer


def moved(mixer: Hawk) -> Hawk:
    """The mixer in float64, every parameter away from where it starts: biases are not 0, taps not small."""
    mixer = mixer.double()
    with torch.no_grad():
        for seed, parameter in enumerate(mixer.parameters()):
            parameter += 0.5 * torch.randn(parameter.shape, generator=generator(seed), dtype=parameter.dtype)
    return mixer


def inputs(time: int = TIME) -> torch.Tensor:
    return torch.randn(2, time, D, generator=generator(), dtype=torch.float64)


def by_hand(mixer: Hawk, x: torch.Tensor, *, c: float, gelu) -> torch.Tensor:
    """The file's equations step by step; the paper's recurrence is written out once more."""
    unit, outputs = mixer.rg_lru, []
    matrices = {
        name: torch.block_diag(*getattr(unit, name).weight) for name in ("recurrence_gate", "input_gate")
    }
    u = x @ mixer.u.weight.T + mixer.u.bias
    h = x.new_zeros(len(x), mixer.d_rnn)
    for t in range(x.shape[1]):
        g = gelu(x[:, t] @ mixer.gate.weight.T + mixer.gate.bias)
        v = u[:, t]
        if mixer.conv.present:
            taps = mixer.conv.weight
            v = sum(taps[:, j] * u[:, t - j] for j in range(min(taps.shape[1], t + 1))) + mixer.conv.bias
        r = torch.sigmoid(v @ matrices["recurrence_gate"].T + unit.recurrence_gate.bias)
        i = torch.sigmoid(v @ matrices["input_gate"].T + unit.input_gate.bias)
        a_t = torch.sigmoid(unit.Lambda) ** (c * r)
        root = 1.0 if t == 0 and unit.start == "whole" else torch.sqrt(1 - a_t**2)
        h = a_t * h + root * (i * v)
        outputs.append((g * h) @ mixer.out.weight.T + mixer.out.bias)
    return torch.stack(outputs, 1)


def gelu(z):
    return z * (1 + torch.erf(z / math.sqrt(2))) / 2


def gelu_tanh(z):
    return z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) / 2


@pytest.mark.parametrize("case", CASES)
def test_the_block_and_its_gradients_are_its_equations(case):
    arguments = CASES[case]
    mixer, x = moved(make(**arguments)), inputs().requires_grad_()
    activation = gelu_tanh if arguments.get("variant") == "released" else gelu
    ours, theirs = mixer(x)[0], by_hand(mixer, x, c=arguments.get("c", 8.0), gelu=activation)
    assert_agree(ours, theirs)
    wanted = [x, *mixer.parameters()]
    cotangent = torch.randn(ours.shape, generator=generator(2), dtype=ours.dtype)
    assert_agree(torch.autograd.grad(ours, wanted, cotangent), torch.autograd.grad(theirs, wanted, cotangent))


def test_every_argument_of_the_unit_reaches_it():
    mixer = make(
        64,
        d_rnn=4096,
        n_blocks=8,
        c=2.0,
        a_init=(0.2, 0.3),
        a_init_of="a^c",
        start="whole",
        recurrence_gate=False,
    )
    a = torch.sigmoid(mixer.rg_lru.Lambda.double()) ** 2
    assert 0.2 <= a.min() < 0.201 and 0.299 < a.max() <= 0.3
    assert (mixer.rg_lru.recurrence_gate, mixer.rg_lru.start) == (None, "whole")
    assert make(input_gate=False).rg_lru.input_gate is None


def test_the_variant_sets_all_that_paper_and_code_do_differently():
    for variant, start, activation, low, high in (
        ("paper", "scaled", "gelu", 0.9 ** (1 / 8), 0.999 ** (1 / 8)),
        ("released", "whole", "gelu_tanh", 0.9, 0.999),
    ):
        mixer = make(64, d_rnn=4096, n_blocks=8, variant=variant)
        assert (mixer.rg_lru.start, mixer.activation) == (start, activation)
        a = torch.sigmoid(mixer.rg_lru.Lambda.detach().double())
        assert a.min() == pytest.approx(low, abs=1e-3) and a.max() == pytest.approx(high, abs=1e-4)
    mixer = make(variant="released", activation="gelu", start="scaled")
    assert (mixer.rg_lru.start, mixer.activation) == ("scaled", "gelu")


def test_matrices_start_normal_by_their_inputs_and_taps_small():
    mixer = make(768)
    assert mixer.d_rnn == 1024
    for linear, inputs in ((mixer.gate, 768), (mixer.u, 768), (mixer.out, 1024)):
        assert linear.weight.std().item() == pytest.approx(1 / math.sqrt(inputs), rel=0.01)
        assert (linear.bias == 0).all()
    assert mixer.conv.weight.std().item() == pytest.approx(0.05, rel=0.05)
    assert (mixer.conv.bias == 0).all()


def test_widths_and_parameter_counts():
    widths = {d: make(d).d_rnn for d in (1, 4, 64, 768, 1024)}
    assert widths == {1: 1, 4: 5, 64: 80, 768: 1024, 1024: 1360}
    assert make(100, n_blocks=10).d_rnn == 130
    # three matrices, the taps, two matrices of 16 blocks, all with biases, and Lambda
    expected = 3 * 64 * 80 + 80 + 80 + 64 + 5 * 80 + 2 * (80 * 5 + 80) + 80
    assert sum(p.numel() for p in make(64).parameters()) == expected
    assert make(64).state_size == 4 * 80 and make(64, conv_size=None, start="whole").state_size == 81


def test_transitions_and_token_mixing_are_those_of_the_unit():
    mixer, x = moved(make()), inputs()
    v, _ = mixer.conv(mixer.u(x))
    assert_agree(mixer.transitions(x).magnitude, mixer.rg_lru.transitions(v).magnitude)
    assert_agree(mixer.token_mixing(x), mixer.rg_lru.token_mixing(v))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"d_rnn": 0}, "`d_rnn` must be at least 1; got 0"),
        (
            {"d_rnn": 6, "n_blocks": 4},
            "`n_blocks` must be a positive divisor of the width of the state = 6; got 4",
        ),
        ({"n_blocks": 0}, "got 0"),
        ({"n_blocks": 100}, "must be a positive divisor of the width of the state = 8; got 100"),
        ({"conv_size": 0}, "a mixer's `conv_size`, must be at least 1 tap; got 0"),
        ({"activation": "gelu_tan"}, "there is no `activation` 'gelu_tan'; did you mean 'gelu_tanh'"),
    ],
)
def test_argument_errors(arguments, message):
    with pytest.raises(ValueError) as error:
        make(**arguments)
    assert message in str(error.value)
