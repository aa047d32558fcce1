import math

import pytest
import torch
from torch import nn

from linrec.nn import Gate, GateLinear, Transition, groups_of
from linrec.nn.gates import log_refined, positive
from linrec.testing import assert_agree, generator, tolerance

D = 8


def make(seed: int = 0, *, n_heads: int = 4, d_head: int = 2, **arguments) -> Transition:
    torch.manual_seed(seed)
    return Transition(D, n_heads, d_head, **arguments)


def inputs(scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(3, 5, D, generator=generator())


def project(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (x @ linear.weight.T + linear.bias).reshape(3, 5, 4, 2)


MAGNITUDES = {"sigmoid": torch.sigmoid, "stable_exp": lambda gamma: torch.exp(-torch.exp(gamma))}
PHASES = {"identity": lambda theta: theta, "tanh": lambda theta: math.pi * torch.tanh(theta)}


@pytest.mark.parametrize("magnitude", MAGNITUDES)
@pytest.mark.parametrize("phase", PHASES)
def test_equation_25(magnitude, phase):
    gates = make(magnitude_activation=magnitude, phase_activation=phase)
    x = inputs()
    log_decay, angle = gates(x)
    a = torch.polar(log_decay.exp(), angle)
    f, g = MAGNITUDES[magnitude], PHASES[phase]
    expected = f(project(gates.magnitude, x)) * torch.exp(1j * g(project(gates.phase, x)))
    assert_agree(a, expected)


@pytest.mark.parametrize("magnitude", MAGNITUDES)
def test_magnitudes_reach_all_of_the_open_unit_interval(magnitude):
    log_decay, _ = make(magnitude_activation=magnitude)(inputs(scale=20))
    decay = log_decay.exp()
    assert (log_decay <= 0).all()
    # a sigmoid of an absolute value would never fall below one half
    assert (decay < 0.01).any() and (decay > 0.99).any() and ((decay > 0.2) & (decay < 0.45)).any()


def test_saturated_sigmoids_keep_their_logarithm():
    gates = make()
    with torch.no_grad():
        gates.magnitude.weight.zero_()
        gates.magnitude.bias[:2] = torch.tensor([-200.0, 40.0])
    log_decay, _ = gates(inputs())
    assert_agree(log_decay[0, 0, 0], torch.tensor([-200.0, -math.exp(-40)]))


@pytest.mark.parametrize("magnitude", MAGNITUDES)
def test_extreme_projections_keep_finite_logarithms_and_gradients(magnitude):
    gates = make(magnitude_activation=magnitude).double()
    x = inputs(scale=1e4).double().requires_grad_()
    log_decay, _ = gates(x)
    decay = log_decay.exp()
    assert torch.isfinite(log_decay).all() and (decay == 0).any() and (decay == 1).any()
    assert torch.isfinite(torch.autograd.grad(decay.sum(), x)[0]).all()


def test_tanh_phases_stay_within_half_a_turn_and_identity_phases_do_not():
    assert make(phase_activation="tanh")(inputs(scale=20))[1].abs().max() <= math.pi
    assert make()(inputs(scale=20))[1].abs().max() > math.pi


def test_without_phase_there_is_no_phase_projection():
    gates = make(phase_activation="none")
    assert gates(inputs())[1] is None
    assert {name for name, _ in gates.named_parameters()} == {"magnitude.weight", "magnitude.bias"}


def test_fixed_transitions_are_constants_of_every_channel():
    gates = make(transition="fixed")
    log_decay, phase = gates(inputs())
    assert log_decay.shape == phase.shape == (4, 2)
    assert_agree(log_decay, nn.functional.logsigmoid(gates.magnitude.bias.reshape(4, 2)))
    assert {name: p.shape for name, p in gates.named_parameters()} == {
        "magnitude.bias": (8,),
        "phase.bias": (8,),
    }


def test_every_parameter_is_marked_as_transition_without_weight_decay():
    for transition in ("data", "fixed"):
        groups = {*groups_of(make(transition=transition)).values()}
        assert {(g.name, g.weight_decay) for g in groups} == {("transition", False)}


@pytest.mark.parametrize("magnitude", MAGNITUDES)
@pytest.mark.parametrize("transition", ["data", "fixed"])
def test_magnitude_init_draws_time_scales_log_uniformly(magnitude, transition):
    low, high = 0.5, 0.999
    gates = make(
        n_heads=1000, magnitude_activation=magnitude, transition=transition, magnitude_init=(low, high)
    )
    decay = gates(torch.zeros(1, 1, D))[0].exp().flatten()
    assert decay.min() >= low - 1e-4 and decay.max() <= high + 1e-4
    # log 1 / (1 - |a|) is uniform: compare the empirical distribution with it (Kolmogorov-Smirnov, p ~ 1e-5)
    first, last = math.log(1 / (1 - low)), math.log(1 / (1 - high))
    uniform = ((-torch.log1p(-decay) - first) / (last - first)).sort().values
    distance = (uniform - (torch.arange(len(uniform)) + 0.5) / len(uniform)).abs().max()
    assert distance < 2.5 / math.sqrt(len(uniform))


def test_magnitude_init_of_one_value_is_that_value():
    gates = make(magnitude_init=(0.9, 0.9))
    assert_agree(gates(torch.zeros(1, 1, D))[0].exp(), torch.full((1, 1, 4, 2), 0.9))


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("transition", ["data", "fixed"])
def test_phase_init_draws_one_phase_in_each_equal_part_in_random_order(phase, transition):
    angle = [
        make(phase_activation=phase, transition=transition, phase_init=math.pi, seed=seed)(
            torch.zeros(1, 1, D)
        )[1].flatten()
        for seed in range(2)
    ]
    for drawn in angle:
        parts = (drawn / (math.pi / 8)).floor().long()
        assert sorted(parts.tolist()) == list(range(8))
    assert not torch.equal(*(drawn.argsort() for drawn in angle))


def test_without_init_arguments_the_biases_are_those_of_a_linear():
    bound = 1 / math.sqrt(D)
    for transition in ("data", "fixed"):
        gates = make(n_heads=2000, transition=transition)
        for bias in (gates.magnitude.bias, gates.phase.bias):
            assert bias.abs().max() <= bound
            assert bias.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)


def test_transition_weight_scale_scales_both_weights_and_no_bias():
    plain, scaled = make(seed=3), make(seed=3, transition_weight_scale=0.25)
    for one, other in ((plain.magnitude, scaled.magnitude), (plain.phase, scaled.phase)):
        torch.testing.assert_close(other.weight, 0.25 * one.weight)
        torch.testing.assert_close(other.bias, one.bias)
    log_decay, phase = make(transition_weight_scale=0.0)(inputs())
    assert_agree(log_decay, log_decay[:1, :1].expand_as(log_decay))
    assert_agree(phase, phase[:1, :1].expand_as(phase))


def test_gates_stay_in_float32_under_autocast():
    gates = make()
    x = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = gates(x)
    torch.testing.assert_close(under, gates(x), rtol=0, atol=0)


@pytest.mark.parametrize("transition", ["data", "fixed"])
def test_dtypes_of_half_and_double_modules(transition):
    x = inputs()
    assert {t.dtype for t in make(transition=transition).bfloat16()(x.bfloat16())} == {torch.float32}
    assert {t.dtype for t in make(transition=transition).double()(x.double())} == {torch.float64}


def test_gate_linear_equals_linear():
    linear = GateLinear(D, 3, bias=False)
    torch.testing.assert_close(linear(inputs()), inputs() @ linear.weight.T, **tolerance(torch.float32))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"magnitude_activation": "sigmoids"},
            "there is no `magnitude_activation` 'sigmoids'; did you mean 'sigmoid'",
        ),
        ({"phase_activation": "tan"}, "there is no `phase_activation` 'tan'; did you mean 'tanh'"),
        ({"transition": "fix"}, "there is no `transition` 'fix'; did you mean 'fixed'"),
        (
            {"magnitude_init": (0.9, 1.0)},
            "`magnitude_init` must be (low, high) with 0 < low <= high < 1; got (0.9, 1.0)",
        ),
        ({"magnitude_init": (0.9, 0.5)}, "0 < low <= high < 1"),
        ({"phase_init": 4.0}, "`phase_init` must be a phase in radians in (0, pi]; got 4.0"),
        ({"phase_init": 1.0, "bias": False}, "need `bias=True`; got `bias=False`"),
    ],
)
def test_errors_say_what_was_expected(arguments, message):
    with pytest.raises(ValueError) as error:
        make(**arguments)
    assert message in str(error.value)


def test_a_refined_gate_is_the_papers_formula():
    gate = Gate(D, 2000, refine=True).double()
    x = 9 * inputs().double()
    f, r = (torch.sigmoid(x @ linear.weight.T + linear.bias) for linear in (gate.f, gate.r))
    expected = r * (1 - (1 - f) ** 2) + (1 - r) * f**2
    assert_agree(gate(x), (expected, 1 - expected))
    assert_agree(gate.log(x).exp(), expected)
    plain = Gate(D, 3)
    f = torch.sigmoid(inputs() @ plain.f.weight.T + plain.f.bias)
    assert_agree(plain(inputs()), (f, 1 - f))
    assert_agree(plain.log(inputs()), f.log())


def test_refined_gates_keep_their_digits_and_gradients_far_from_one_half():
    f, r = (torch.tensor(rows) for rows in ([20.0, -20.0, 20.0, -20.0], [50.0, -50.0, -50.0, 50.0]))
    log_g, log_rest = log_refined(f.requires_grad_(), r)
    # (1 - f)^2, f^2; 2 (1 - f), 2 f
    expected = [-40.0, -40.0, math.log(2) - 20, math.log(2) - 20]
    found = torch.stack([log_rest[0], log_g[1], log_rest[2], log_g[3]])
    assert_agree(found, torch.tensor(expected))
    (gradient,) = torch.autograd.grad(found.sum(), f)
    assert_agree(gradient, torch.tensor([-2.0, 2.0, -1.0, 1.0]))
    far = torch.tensor([300.0, -300.0])
    for sign in (1, -1):
        logs = log_refined(far.requires_grad_(), sign * far)
        (gradient,) = torch.autograd.grad(sum(part.sum() for part in logs), far)
        assert all(torch.isfinite(part).all() for part in (*logs, gradient))


def test_positive_candidates():
    u = torch.linspace(-5, 5, 41, dtype=torch.float64)
    expected = torch.tensor([v + 0.5 if v >= 0 else 1 / (1 + math.exp(-v)) for v in u.tolist()])
    assert_agree(positive(u), expected.double(), dtype=torch.float32)
    assert positive(torch.tensor([-1e-9, 0.0, 1e-9])).tolist() == pytest.approx([0.5] * 3)


@pytest.mark.parametrize("refine", [False, True])
def test_gates_start_uniformly_and_refine_gates_against_them(refine):
    torch.manual_seed(0)
    gate = Gate(D, 1000, refine=refine, uniform_init=True)
    start, _ = gate(torch.zeros(1, D))
    f = torch.sigmoid(gate.f.bias)
    assert f.min() >= 1e-3 and f.max() <= 1 - 1e-3
    distance = (f.sort().values - (torch.arange(1000) + 0.5) / 1000).abs().max()
    assert distance < 2.5 / math.sqrt(1000)
    if refine:
        assert torch.equal(gate.r.bias, -gate.f.bias)
        assert_agree(start[0], (1 - f) * (1 - (1 - f) ** 2) + f**3)
    else:
        assert_agree(start[0], f)
    assert Gate(D, 1, uniform_init=True).f.bias.abs().item() < 1e-6
    bound = 1 / math.sqrt(D)
    for linear in (Gate(D, 2000).f, Gate(D, 2000, refine=True).r):
        assert linear.bias.abs().max() <= bound
        assert linear.bias.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)


def test_gates_are_marked():
    groups = groups_of(Gate(D, 3, refine=True))
    assert len(groups) == 4
    assert {(group.name, group.weight_decay) for group in groups.values()} == {("transition", False)}
