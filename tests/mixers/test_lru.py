import math

import pytest
import torch

from linrec.mixers import build, lru
from linrec.mixers.lru import LRU
from linrec.nn import groups_of
from linrec.testing import assert_agree, generator

D = 6
CASES = {
    "paper": {},
    "smaller state": {"d_state": 3},
    "long memory": {"d_state": 8, "r_min": 0.99, "r_max": 0.9999, "max_phase": math.pi / 10},
    "forget gate": {"forget_gate": True},
    "forget gate, smaller state": {"forget_gate": True, "d_state": 3, "max_phase": 1.0},
}
every_case = pytest.mark.parametrize("case", CASES)


def make(d_model: int = D, **arguments) -> LRU:
    torch.manual_seed(0)
    mixer = build("lru", d_model, **arguments)
    assert isinstance(mixer, LRU)
    return mixer


def moved(mixer: LRU) -> LRU:
    """The mixer in float64, every parameter away from where it starts: gamma is not sqrt(1 - |lambda|^2)."""
    mixer = mixer.double()
    with torch.no_grad():
        for seed, parameter in enumerate(mixer.parameters()):
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator(seed), dtype=parameter.dtype)
    return mixer


def inputs(time: int = 7) -> torch.Tensor:
    return torch.randn(2, time, D, generator=generator(), dtype=torch.float64)


def states(mixer: LRU) -> torch.Tensor:
    return torch.randn(2, mixer.d_state, generator=generator(1), dtype=torch.complex128)


def transition(mixer: LRU, x: torch.Tensor) -> torch.Tensor:
    """lambda at the inputs x (b, d_model), in double precision."""
    nu_log, theta_log = mixer.nu_log, mixer.theta_log.double()
    if not isinstance(nu_log, torch.nn.Parameter):
        nu_log = x @ nu_log.weight.T.double() + nu_log.bias.double()
    return torch.exp(-nu_log.double().exp() + 1j * theta_log.exp())


def by_hand(mixer: LRU, x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The paper's equations step by step, with complex matrices."""
    B = mixer.B[0::2] + 1j * mixer.B[1::2]
    C = mixer.C[:, 0::2] - 1j * mixer.C[:, 1::2]
    outputs = []
    for x_t in x.unbind(1):
        h = transition(mixer, x_t) * h + mixer.gamma_log.exp() * ((x_t + 0j) @ B.T)
        outputs.append((h @ C.T).real + mixer.D * x_t)
    return torch.stack(outputs, 1), h


@every_case
def test_the_layer_and_its_gradients_are_the_papers_equations(case):
    mixer = moved(make(**CASES[case]))
    x, h = inputs().requires_grad_(), states(mixer).requires_grad_()
    ours, theirs = mixer(x, h), by_hand(mixer, x, h)
    assert_agree(ours, theirs)
    wanted = [x, h, *mixer.parameters()]
    cotangents = [torch.randn(tensor.shape, generator=generator(2), dtype=tensor.dtype) for tensor in theirs]
    assert_agree(
        torch.autograd.grad(ours, wanted, cotangents), torch.autograd.grad(theirs, wanted, cotangents)
    )


def test_a_constant_transition_is_not_repeated_over_time(monkeypatch):
    shapes = []

    def scan(a, x, **arguments):
        shapes.append(tuple(a.shape))
        return lru_scan(a, x, **arguments)

    lru_scan = lru.scan
    monkeypatch.setattr(lru, "scan", scan)
    for arguments in ({}, {"forget_gate": True}):
        make(d_state=3, **arguments)(inputs().float())
    assert shapes == [(3,), (2, 7, 3)]


def test_without_its_projection_the_forget_gate_is_the_constant_magnitude():
    gated, plain = moved(make(forget_gate=True)), moved(make())
    with torch.no_grad():
        gated.nu_log.weight.zero_()
        plain.nu_log.copy_(gated.nu_log.bias)
        for name in ("theta_log", "gamma_log", "B", "C", "D"):
            getattr(plain, name).copy_(getattr(gated, name))
    assert_agree(gated(inputs()), plain(inputs()))


def test_the_forget_gate_chooses_magnitudes_and_no_phases():
    mixer = moved(make(forget_gate=True))
    start = states(mixer)
    # what the initial state leaves behind after one step, apart from the input's own part
    x = 20 * inputs(1)
    left = (mixer(x, start)[1] - mixer(x)[1]) / start
    assert (left.abs() < 0.01).any() and (left.abs() > 0.99).any() and (left.abs() <= 1).all()
    expected = torch.polar(left.abs(), mixer.theta_log.exp().expand_as(left.abs()))
    assert_agree(left, expected)


def largest_gap(sample: torch.Tensor, high: float, low: float = 0.0) -> float:
    """Kolmogorov's distance between a sample and the uniform distribution on [low, high]."""
    found = (sample.detach().double().sort().values - low) / (high - low)
    steps = torch.arange(len(found) + 1) / len(found)
    return float(torch.maximum((found - steps[:-1]).abs(), (found - steps[1:]).abs()).max())


@pytest.mark.parametrize("forget_gate", [False, True])
@pytest.mark.parametrize(("r_min", "r_max", "max_phase"), [(0.0, 1.0, math.tau), (0.5, 0.9, 0.1)])
def test_transitions_start_evenly_over_the_area_of_the_ring(r_min, r_max, max_phase, forget_gate):
    n = 4096
    mixer = make(d_state=n, r_min=r_min, r_max=r_max, max_phase=max_phase, forget_gate=forget_gate)
    found = transition(mixer, torch.zeros(1, D, dtype=torch.float64)).reshape(n)
    # area grows with the square of the radius; uniform samples stay below this 99 times in 100
    bound = 1.63 / math.sqrt(n)
    assert largest_gap(found.abs() ** 2, r_max**2, r_min**2) < bound
    assert largest_gap(mixer.theta_log.exp(), max_phase) < bound
    phases = found.angle().remainder(math.tau)
    assert_agree(phases, mixer.theta_log.double().exp())
    together = torch.corrcoef(torch.stack([found.abs() ** 2, phases]))[0, 1]
    assert together.abs() < 3 / math.sqrt(n)


@pytest.mark.parametrize("drawn", [0.0, 1 - 2**-24])
def test_transitions_start_inside_the_circle_at_the_ends_of_the_draw(drawn, monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *shape: torch.full(shape, drawn))
    for r_min in (0.0, 0.9):
        mixer = make(r_min=r_min, r_max=1.0)
        assert all(parameter.isfinite().all() for parameter in mixer.parameters())
        assert (transition(mixer, torch.zeros(1, D)).abs() < 1).all()


@pytest.mark.parametrize("r_min", [0.0, 0.9, 0.99999])
def test_gamma_starts_at_the_papers_normalisation(r_min):
    mixer = make(d_state=512, r_min=r_min)
    magnitude = torch.exp(-mixer.nu_log.double().exp())
    expected = torch.sqrt(1 - magnitude**2)
    torch.testing.assert_close(mixer.gamma_log.double().exp(), expected, rtol=1e-6, atol=0)
    gated = make(d_state=512, r_min=r_min, forget_gate=True)
    expected = torch.sqrt(1 - torch.exp(-2 * gated.nu_log.bias.double().exp()))
    torch.testing.assert_close(gated.gamma_log.double().exp(), expected, rtol=1e-6, atol=0)


def test_matrices_start_normal_with_the_papers_variances():
    mixer = make(64, d_state=256)
    for parameter, variance in ((mixer.B, 1 / 128), (mixer.C, 1 / 256), (mixer.D, 1.0)):
        sample = parameter.detach().double().flatten() / math.sqrt(variance)
        # mean and variance of n normal numbers, within three of their standard deviations
        assert sample.mean().abs() < 3 / math.sqrt(len(sample))
        assert (sample.var() - 1).abs() < 3 * math.sqrt(2 / len(sample))
        uniform = (1 + torch.erf(sample / math.sqrt(2))) / 2
        assert largest_gap(uniform, 1.0) < 1.63 / math.sqrt(len(sample))


@pytest.mark.parametrize("ring", [{}, {"r_min": 0.99, "r_max": 0.999}])
def test_white_noise_starts_as_states_and_outputs_of_unit_variance(ring):
    mixer = make(64, d_state=256, **ring)
    with torch.no_grad():
        mixer.D.zero_()
        # the end of six thousand steps, six times the longest memory, is stationary
        x = torch.randn(4, 6000, 64, generator=generator())
        _, state = mixer(x)
        y, _ = mixer(torch.randn(4, 500, 64, generator=generator(1)), state)
    assert abs(state.abs().square().mean() - 1) < 0.1
    assert abs(y.square().mean() - 1) < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ten_thousand_steps_of_memory(dtype):
    # without input, a state turns and shrinks by a power of lambda; the shortest memory is 10,000 steps
    mixer = make(r_min=0.9999, r_max=0.99999, max_phase=0.01).to(dtype)
    x, start = torch.zeros(2, 10_000, D, dtype=dtype), states(mixer)
    _, state = mixer(x, start)
    nu, theta = mixer.nu_log.double().exp(), mixer.theta_log.double().exp()
    expected = torch.exp(10_000 * (-nu + 1j * theta)) * start
    assert expected.abs().min() > 0.01
    # a float32 transition is off by half a unit in its last place, 2^-25, ten thousand times
    error = (state - expected).abs() / expected.abs()
    assert error.max() < (1e-9 if dtype == torch.float64 else 10_000 * 2**-24)


@pytest.mark.parametrize("arguments", [{}, {"forget_gate": True}])
def test_half_precision_rounds_no_transition_and_no_state(arguments):
    mixer = make(r_min=0.999, r_max=0.9999, max_phase=0.3, **arguments)
    x, start = torch.zeros(2, 1000, D), states(mixer).to(torch.complex64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, state = mixer(x, start)
    assert_agree(state, transition(mixer, x[:, 0].double()) ** 1000 * start)
    mixer = mixer.bfloat16()
    _, state = mixer(x.bfloat16(), start)
    assert_agree(state, transition(mixer, x[:, 0].double()) ** 1000 * start)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # nu_log, theta_log and gamma_log have N numbers, B and C N x D complex ones, D has D
        ({}, 3 * D + 4 * D * D + D),
        ({"d_state": 10}, 3 * 10 + 4 * 10 * D + D),
        # nu_log becomes a bias, beside a matrix
        ({"d_state": 10, "forget_gate": True}, 3 * 10 + 5 * 10 * D + D),
    ],
)
def test_parameter_counts(arguments, expected):
    parameters = list(make(**arguments).parameters())
    assert sum(parameter.numel() for parameter in parameters) == expected
    assert not any(parameter.is_complex() for parameter in parameters)


def test_the_parameters_of_the_recurrence_are_marked():
    def marked(mixer: LRU) -> set[str]:
        groups = groups_of(mixer)
        assert not any(group.weight_decay for group in groups.values() if group.name == "transition")
        return {name for name, group in groups.items() if group.name == "transition"}

    assert marked(make()) == {"nu_log", "theta_log", "gamma_log", "B"}
    assert marked(make(forget_gate=True)) == {
        "nu_log.weight",
        "nu_log.bias",
        "theta_log",
        "gamma_log",
        "B",
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"d_state": 0}, "`d_state` must be at least 1; got 0"),
        ({"r_min": 0.9, "r_max": 0.5}, "0 <= r_min < r_max <= 1; got 0.9 and 0.5"),
        ({"r_min": -0.1}, "0 <= r_min < r_max <= 1; got -0.1 and 1.0"),
        ({"r_max": 1.1}, "0 <= r_min < r_max <= 1; got 0.0 and 1.1"),
        ({"max_phase": 0.0}, "`max_phase` must be a phase in radians in (0, 2 pi]; got 0.0"),
        ({"max_phase": 360.0}, "`max_phase` must be a phase in radians in (0, 2 pi]; got 360.0"),
        ({"forget_gates": True}, "did you mean 'forget_gate'"),
    ],
)
def test_argument_errors(arguments, message):
    with pytest.raises(ValueError) as error:
        make(**arguments)
    assert message in str(error.value)


def test_input_errors():
    with pytest.raises(ValueError, match=r"`x` must have shape .* \(batch, time, 6\)"):
        make()(torch.zeros(2, 3, 5))
    with pytest.raises(TypeError, match="Embed tokens first"):
        make()(torch.zeros(2, 3, 6, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"for these rows, a tensor \(2, 6\), .*; got a tensor \(2, 5\)"):
        make()(torch.zeros(2, 3, 6), make(d_state=5).init_state(2))
