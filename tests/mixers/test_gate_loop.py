import math

import pytest
import torch

from linrec.mixers import build
from linrec.mixers.gate_loop import GateLoop
from linrec.nn import groups_of
from linrec.ops.gate_loop import gate_loop
from linrec.testing import assert_agree, generator

D = 6


def make(d_model: int = D, **arguments) -> GateLoop:
    torch.manual_seed(0)
    mixer = build("gate_loop", d_model, **arguments)
    assert isinstance(mixer, GateLoop)
    return mixer


def inputs(time: int = 7) -> torch.Tensor:
    return torch.randn(2, time, D, generator=generator(), dtype=torch.float64)


def test_the_default_layer_is_equations_7_8_24_25():
    # written out once more, step by step in complex numbers, from the paper
    mixer, x = make().double(), inputs()
    q, k, v = (x @ linear.weight.T + linear.bias for linear in (mixer.q, mixer.k, mixer.v))
    magnitude, phase = mixer.transition.magnitude, mixer.transition.phase
    a = torch.sigmoid(x @ magnitude.weight.T + magnitude.bias)
    a = a * torch.exp(1j * (x @ phase.weight.T + phase.bias))
    h, expected = torch.zeros(2, D, dtype=torch.complex128), []
    for n in range(x.shape[1]):
        h = h * a[:, n] + k[:, n] * v[:, n]
        expected.append((q[:, n] * h).real)
    y, state = mixer(x)
    assert_agree(y, torch.stack(expected, 1))
    assert_agree(state, h.reshape(2, D, 1, 1))


def test_heads_hold_outer_products():
    mixer, x = make(n_heads=2, d_qk=4, d_v=6).double(), inputs()
    log_decay, phase = mixer.transition(x)
    assert log_decay.shape == phase.shape == (2, 7, 2, 2)
    a = torch.polar(log_decay.exp(), phase)
    q, k = mixer.q(x).reshape(2, 7, 2, 2), mixer.k(x).reshape(2, 7, 2, 2)
    v = mixer.v(x).reshape(2, 7, 2, 3)
    h, expected = torch.zeros(2, 2, 2, 3, dtype=torch.complex128), []
    for n in range(7):
        h = a[:, n, :, :, None] * h + k[:, n, :, :, None] * v[:, n, :, None, :]
        expected.append(torch.einsum("bhk,bhkv->bhv", q[:, n].to(h), h).real.reshape(2, 6))
    y, state = mixer(x)
    assert_agree(y, torch.stack(expected, 1))
    assert_agree(state, h)


def test_forward_uses_the_transition_that_it_shows():
    mixer, x = make(), inputs().float()
    q, k, v = (linear(x).unflatten(-1, (D, 1)) for linear in (mixer.q, mixer.k, mixer.v))
    log_decay, phase = mixer.transition(x)
    assert_agree(mixer(x)[0], gate_loop(q, k, v, log_decay, phase)[0].flatten(-2))


def test_fixed_equals_data_whose_transition_weights_are_zero():
    data, fixed = make(transition_weight_scale=0.0).double(), make(transition="fixed").double()
    fixed.load_state_dict(
        {
            name: tensor
            for name, tensor in data.state_dict().items()
            if not ("transition" in name and "weight" in name)
        }
    )
    assert_agree(fixed(inputs())[0], data(inputs())[0])


def test_without_phase_the_recurrence_is_real():
    mixer = make(phase_activation="none")
    assert mixer(inputs().float())[1].dtype == mixer.init_state(2).dtype == torch.float32
    assert make()(inputs().float())[1].dtype == make().init_state(2).dtype == torch.complex64


def test_the_sign_of_a_channels_phases_does_not_matter():
    # why `phase_init` needs positive phases only
    mixer, x = make().double(), inputs()
    y, _ = mixer(x)
    with torch.no_grad():
        for parameter in mixer.transition.phase.parameters():
            parameter[::2] *= -1
    assert_agree(mixer(x)[0], y)


def test_norm_gate_and_projection_follow_in_this_order():
    arguments = {"output_norm": "layer", "output_gate": True, "output_projection": True}
    plain, full, x = make().double(), make(**arguments).double(), inputs()
    plain.load_state_dict({name: full.state_dict()[name] for name in plain.state_dict()})
    y = torch.nn.functional.layer_norm(plain(x)[0], (D,), full.norm.weight, full.norm.bias)
    gate = x @ full.gate.weight.T + full.gate.bias
    y = y * gate * torch.sigmoid(gate)
    assert_agree(full(x)[0], y @ full.out.weight.T + full.out.bias)


@pytest.mark.parametrize("transition", ["data", "fixed"])
def test_scaled_queries_give_every_time_scale_the_same_output_variance(transition):
    arguments = {"transition": transition, "magnitude_init": (0.5, 0.99)}
    torch.manual_seed(0)
    plain = GateLoop(64, **arguments)
    torch.manual_seed(0)
    scaled = GateLoop(64, scale_query_init=True, **arguments)
    magnitude = plain.transition(torch.zeros(1, 1, 64))[0].exp().flatten()
    gain = (1 - magnitude**2).sqrt()
    assert_agree(scaled.q.weight, plain.q.weight * gain[:, None])
    assert_agree(scaled.q.bias, plain.q.bias * gain)
    assert_agree(scaled.k.weight, plain.k.weight)


def test_gates_start_open_where_asked():
    mixer = GateLoop(8, gate_bias_init=1.0, scale_query_init=True, transition_weight_scale=0.0)
    assert_agree(mixer.q.bias, torch.ones(8))
    assert_agree(mixer.k.bias, torch.ones(8))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # q, k, v, magnitude and phase are D x D with a bias
        ({}, 5 * (D * D + D)),
        ({"bias": False}, 5 * D * D),
        ({"phase_activation": "none"}, 4 * (D * D + D)),
        ({"transition": "fixed"}, 3 * (D * D + D) + 2 * D),
        ({"output_gate": True, "output_projection": True}, 7 * (D * D + D)),
        ({"output_norm": "layer"}, 5 * (D * D + D) + 2 * D),
        # q, k, magnitude and phase to 4, v to 2, out from 2
        (
            {"d_qk": 4, "d_v": 2, "n_heads": 2, "output_projection": True},
            4 * (4 * D + 4) + 2 * D + 2 + 2 * D + D,
        ),
    ],
)
def test_parameter_counts(arguments, expected):
    assert sum(p.numel() for p in make(**arguments).parameters()) == expected


def test_initial_distribution_is_that_of_torchs_linear():
    mixer = make(512)
    for name, parameter in mixer.named_parameters():
        # uniform in +- 1 / sqrt(d_model)
        bound = 1 / math.sqrt(512)
        assert parameter.abs().max() <= bound, name
        assert parameter.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.1), name
        assert abs(parameter.mean().item()) < 0.1 * bound, name


def test_only_the_transition_is_marked():
    groups = groups_of(make(output_gate=True, output_projection=True))
    assert {name for name, group in groups.items() if group.name == "transition"} == {
        f"transition.{part}.{kind}" for part in ("magnitude", "phase") for kind in ("weight", "bias")
    }


def test_state_size_counts_h_dk_dv():
    assert make().state_size == D
    assert make(n_heads=2, d_qk=4, d_v=6).state_size == 2 * 2 * 3


def test_the_state_carries_on_from_a_batch_of_another_call():
    mixer, x = make(), inputs().float()
    y, _ = mixer(x)
    _, state = mixer(x[:, :3])
    assert_agree(mixer(x[:, 3:], state)[0], y[:, 3:])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_heads": 4}, "`d_qk` must be a positive multiple of `n_heads` = 4; got 6"),
        ({"d_qk": 4, "n_heads": 4}, "`d_v` must be a positive multiple of `n_heads` = 4; got 6"),
        ({"d_v": 12}, "`d_v` must equal `d_model` = 6 where nothing follows the recurrence; got 12"),
        ({"n_heads": 0}, "`d_qk` must be a positive multiple of `n_heads` = 0"),
        ({"gate_bias_init": 1.0, "bias": False}, "needs `bias=True`"),
        ({"output_norm": "batch"}, "there is no `output_norm` 'batch'"),
    ],
)
def test_argument_errors(arguments, message):
    with pytest.raises(ValueError) as error:
        make(**arguments)
    assert message in str(error.value)


def test_input_errors():
    mixer = make()
    with pytest.raises(
        ValueError, match=r"`x` must have shape \(batch, time, d_model\) = \(batch, time, 6\)"
    ):
        mixer(torch.zeros(2, 3, 5))
    with pytest.raises(ValueError, match="A single step is a sequence of length 1"):
        mixer(torch.zeros(2, 6))
    with pytest.raises(TypeError, match="Embed tokens first"):
        mixer(torch.zeros(2, 3, 6, dtype=torch.int64))
    with pytest.raises(ValueError, match="`d_model` must be at least 1; got 0"):
        make(0)
