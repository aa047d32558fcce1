import math

import pytest
import torch
from torch.nn import functional

from linrec.mixers import build
from linrec.mixers.min_gru import MinGRU
from linrec.nn import groups_of
from linrec.testing import assert_agree, generator

D, TIME = 6, 7


def make(d_model: int = D, **arguments) -> MinGRU:
    torch.manual_seed(0)
    mixer = build("min_gru", d_model, **arguments)
    assert isinstance(mixer, MinGRU)
    return mixer


def inputs(scale: float = 2.0) -> torch.Tensor:
    return scale * torch.randn(2, TIME, D, generator=generator(), dtype=torch.float64)


def linear(module, x):
    return x @ module.weight.T + module.bias


def by_hand(mixer, x, h):
    """z, and h of every step, one step at a time."""
    z = torch.sigmoid(linear(mixer.z.f, x))
    if mixer.z.r is not None:
        r = torch.sigmoid(linear(mixer.z.r, x))
        z = r * (1 - (1 - z) ** 2) + (1 - r) * z**2
    candidate = linear(mixer.h, x)
    if mixer.positive:
        candidate = torch.where(candidate >= 0, candidate + 0.5, torch.sigmoid(candidate))
    steps = []
    for t in range(x.shape[1]):
        h = (1 - z[:, t]) * h + z[:, t] * candidate[:, t]
        steps.append(h)
    return z, torch.stack(steps, 1)


def learned_start(mixer):
    """h_0."""
    if mixer.start is None:
        return torch.zeros(mixer.d_state, dtype=torch.float64)
    u = mixer.start
    return torch.where(u >= 0, u + 0.5, torch.sigmoid(u)) if mixer.positive else u


def in_log_space(mixer, x):
    """The paper's parallel form: sums of logarithms, and a logcumsumexp."""
    k = linear(mixer.z.f, x)
    log_z, log_kept = -functional.softplus(-k), -functional.softplus(k)
    u = linear(mixer.h, x)
    log_candidate = torch.where(u >= 0, torch.log(functional.relu(u) + 0.5), -functional.softplus(-u))
    total = log_kept.cumsum(1)
    return torch.exp(total + torch.logcumsumexp(log_z + log_candidate - total, 1))


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"d_state": 9},
        {"candidate": "linear", "learned_start": True},
        {"refine": True, "uniform_init": True, "d_state": 3},
        {"output_projection": True, "learned_start": True},
    ],
)
def test_outputs_state_and_gradients_are_the_papers_equations(arguments):
    mixer, x = make(**arguments).double(), inputs().requires_grad_()
    start = torch.randn(2, mixer.d_state, generator=generator(3), dtype=torch.float64).requires_grad_()
    y, state = mixer(x, start)
    learned = learned_start(mixer)
    _, h = by_hand(mixer, x, start + learned)
    expected = h if mixer.y is None else linear(mixer.y, h)
    assert_agree((y, state), (expected, h[:, -1] - learned))
    wanted = [x, start, *mixer.parameters()]
    weight = torch.randn(y.shape, generator=generator(5), dtype=y.dtype)
    found = torch.autograd.grad((weight * y).sum(), wanted, retain_graph=True)
    assert_agree(found, torch.autograd.grad((weight * expected).sum(), wanted), "gradients")


def test_the_recurrence_is_the_log_space_form():
    mixer, x = make().double(), inputs()
    assert_agree(mixer(x)[0], in_log_space(mixer, x))
    # gates that are closed in single precision: 1 - z would be zero, and its logarithm infinite
    far = 40 * inputs()
    assert_agree(make()(far.float())[0], in_log_space(mixer, far))


def test_a_learned_start_is_normal_and_a_sequence_that_resets_starts_from_it():
    mixer, x = make(learned_start=True).double(), inputs()
    reset = torch.zeros(2, TIME, dtype=torch.bool)
    reset[:, 3] = True
    assert_agree(mixer(x, reset=reset)[0][:, 3:], mixer(x[:, 3:])[0])
    assert_agree(mixer(x)[0], mixer(x, mixer.init_state(2))[0])
    start = make(200, learned_start=True).start
    assert start.std().item() == pytest.approx(1, rel=0.2) and start.mean().abs() < 0.3


def test_inspection_tells_the_gates():
    mixer, x = make(refine=True).double(), inputs()
    z, _ = by_hand(mixer, x, torch.zeros(2, D, dtype=torch.float64))
    found = mixer.transitions(x)
    assert found.phase is None
    assert_agree(found.magnitude, 1 - z)
    mixing = mixer.token_mixing(x)
    assert_agree(mixing[:, 3, 1], (z[:, 1] * (1 - z[:, 2]) * (1 - z[:, 3])).mean(-1))
    assert_agree(mixing[:, 3, 3], z[:, 3].mean(-1))


def test_parameters_state_and_groups():
    count = sum(parameter.numel() for parameter in make().parameters())
    assert count == 2 * (D * D + D)
    count = sum(parameter.numel() for parameter in make(d_state=9, refine=True).parameters())
    assert count == 3 * (D * 9 + 9) + 9 * D + D
    assert make(output_projection=True, learned_start=True).y.weight.shape == (D, D)
    assert make().state_size == D and make(d_state=9).state_size == 9
    groups = groups_of(make(d_state=9, refine=True))
    assert {name for name, group in groups.items() if group.name == "transition"} == {
        f"z.{part}" for part in ("f.weight", "f.bias", "r.weight", "r.bias")
    }


def test_update_gates_start_near_one_half_or_uniformly_spread():
    x = torch.zeros(1, 1, 512)
    kept = make(512).transitions(x).magnitude
    # biases are at most 1 / sqrt(d)
    assert (kept - 0.5).abs().max() <= 0.25 / math.sqrt(512) + 1e-6
    kept = make(512, uniform_init=True).transitions(x).magnitude.flatten()
    assert kept.min() < 0.02 and kept.max() > 0.98
    assert kept.std().item() == pytest.approx(1 / math.sqrt(12), rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"d_state": 9, "output_projection": False}, "where `d_state` = 9 is not `d_model` = 6; got False"),
        ({"d_state": 0}, "`d_state` must be at least 1; got 0"),
        ({"candidate": "positiv"}, "there is no `candidate` 'positiv'; did you mean 'positive'"),
    ],
)
def test_argument_errors(arguments, message):
    with pytest.raises(ValueError) as error:
        make(**arguments)
    assert message in str(error.value)
