import math

import pytest
import torch

from linrec.mixers import build
from linrec.mixers.decaying_fast_weights import DecayingFastWeights
from linrec.nn import groups_of
from linrec.testing import assert_agree, generator

D, TIME = 6, 7


def make(d_model: int = D, **arguments) -> DecayingFastWeights:
    torch.manual_seed(0)
    mixer = build("decaying_fast_weights", d_model, **arguments)
    assert isinstance(mixer, DecayingFastWeights)
    return mixer


def inputs(time: int = TIME) -> torch.Tensor:
    return torch.randn(2, time, D, generator=generator(), dtype=torch.float64)


def linear(x, module):
    return x @ module.weight.T + module.bias


def parts(mixer, x, phi):
    """q, k, v, f and z of the equations, (b, t, h, channels)."""
    split = lambda y: y.unflatten(-1, (mixer.n_heads, -1))  # noqa: E731
    q, k, v = (split(linear(x, module)) for module in (mixer.q, mixer.k, mixer.v))
    q, k = phi(q), phi(k)
    f = torch.ones_like(k) if mixer.f is None else torch.sigmoid(split(linear(x, mixer.f)))
    z = torch.ones_like(v) if mixer.z is None else torch.sigmoid(split(linear(x, mixer.z)))
    return q, k, v, f, z


VARIANTS = {
    "paper": ({}, lambda x: x),
    "heads": ({"n_heads": 3}, lambda x: x),
    "features": ({"feature_map": "relu", "n_heads": 2}, lambda x: x.clamp(min=0)),
    "keys alone": ({"decay": "key", "n_heads": 2}, lambda x: x),
    "sum": ({"decay": "none"}, lambda x: x),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_outputs_and_state_are_the_equations(name):
    arguments, phi = VARIANTS[name]
    mixer, x = make(**arguments).double(), inputs()
    q, k, v, f, z = parts(mixer, x, phi)
    s, outputs = torch.zeros(2, mixer.n_heads, k.shape[-1], v.shape[-1], dtype=torch.float64), []
    for t in range(TIME):
        s = f[:, t, :, :, None] * z[:, t, :, None] * s + k[:, t, :, :, None] * v[:, t, :, None]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], s).flatten(1))
    y, state = mixer(x)
    assert_agree(y, linear(torch.stack(outputs, 1), mixer.out))
    assert_agree(state, s)


@pytest.mark.parametrize("name", VARIANTS)
def test_token_mixing_is_what_values_are_multiplied_by(name):
    arguments, phi = VARIANTS[name]
    mixer, x = make(**arguments).double(), inputs()
    q, k, _, f, z = parts(mixer, x, phi)
    reset = torch.zeros(2, TIME, dtype=torch.bool)
    reset[1, 3] = True
    expected = torch.zeros(2, TIME, TIME, dtype=torch.float64)
    for n in range(TIME):
        for m in range(n + 1):
            decay = f[:, m + 1 : n + 1].prod(1)[..., None] * z[:, m + 1 : n + 1].prod(1)[..., None, :]
            weight = (q[:, n] * k[:, m])[..., None] * decay
            expected[:, n, m] = weight.sum(-2).abs().mean((1, 2))
    expected[1, 3:, :3] = 0
    assert_agree(mixer.token_mixing(x, reset=reset), expected)


def test_transitions_are_the_decays_of_all_entries():
    mixer, x = make(n_heads=2).double(), inputs()
    magnitude, phase = mixer.transitions(x)
    assert phase is None and magnitude.shape == (2, TIME, 18)
    one, other = (torch.randn(2, 2, 3, 3, generator=generator(s), dtype=torch.float64) for s in (1, 2))
    left, right = (mixer(x[:, :1], state)[1] for state in (one, other))
    assert_agree(left - right, (one - other) * magnitude[:, 0].reshape(2, 2, 3, 3))
    keys = make(n_heads=2, decay="key").double()
    assert_agree(keys.transitions(x).magnitude, torch.sigmoid(linear(x, keys.f)))
    assert make(decay="none").double().transitions(x) is None


def test_gates_start_where_they_are_told():
    mixer = make(gate_bias_init=4.0)
    assert_agree(mixer.f.bias, torch.full((D,), 4.0))
    assert_agree(mixer.z.bias, torch.full((D,), 4.0))
    bound = 1 / math.sqrt(D)
    assert make(gate_bias_init=None).f.bias.abs().max() <= bound


def test_gates_start_spread_over_the_unit_interval():
    d = 512
    mixer = make(d, n_heads=64)
    for gate in (mixer.f, mixer.z):
        start = torch.sigmoid(gate.bias.double()).sort().values
        assert start[0] >= 1 / d - 1e-9 and start[-1] <= 1 - 1 / d + 1e-9
        # within a Kolmogorov-Smirnov bound of the uniform distribution
        assert (start - torch.linspace(1 / d, 1 - 1 / d, d)).abs().max() < 1.63 / math.sqrt(d)


def test_parameters_are_linear_layers_of_which_the_gates_are_transitions():
    one = D * D + D
    for arguments, expected in [
        ({}, 6 * one),
        ({"bias": False}, 4 * D * D + 2 * one),
        ({"decay": "key"}, 5 * one),
        ({"decay": "none"}, 4 * one),
        # a decay for each of the 2 D features
        ({"feature_map": "dpfp"}, 5 * one + 2 * one),
    ]:
        assert sum(p.numel() for p in make(**arguments).parameters()) == expected
    marked = {name for name, group in groups_of(make()).items() if group.name == "transition"}
    assert marked == {"f.weight", "f.bias", "z.weight", "z.bias"}
    for parameter in make(512, n_heads=64, gate_bias_init=None).parameters():
        assert parameter.std().item() == pytest.approx(1 / math.sqrt(3 * 512), rel=0.1)


def test_state_size_counts_the_fast_weights():
    assert make(n_heads=2).state_size == 2 * 3 * 3
    assert make(n_heads=2, feature_map="dpfp").state_size == 2 * 6 * 3
    assert [make(width).n_heads for width in (6, 32, 64)] == [1, 2, 4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_heads": 4}, "`d_model` must be a positive multiple of `n_heads` = 4; got 6"),
        ({"decay": "keys"}, "there is no `decay` 'keys'; did you mean 'key'"),
        ({"feature_map": "cosformer"}, 'The mixer "linear_attention" has it'),
        ({"decay": "none", "gate_bias_init": 1.0}, "`gate_bias_init` is of the gates"),
        ({"gate_bias_init": "unform"}, "there is no `gate_bias_init` 'unform'; did you mean 'uniform'"),
    ],
)
def test_argument_errors(arguments, message):
    with pytest.raises(ValueError) as error:
        make(**arguments)
    assert message in str(error.value)
