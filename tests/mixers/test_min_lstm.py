import math

import pytest
import torch
from torch.nn import functional

from linrec.mixers import build
from linrec.mixers.min_lstm import MinLSTM
from linrec.nn import groups_of
from linrec.testing import assert_agree, generator

D, TIME = 6, 7


def make(d_model: int = D, **arguments) -> MinLSTM:
    torch.manual_seed(0)
    mixer = build("min_lstm", d_model, **arguments)
    assert isinstance(mixer, MinLSTM)
    return mixer


def inputs(scale: float = 2.0) -> torch.Tensor:
    return scale * torch.randn(2, TIME, D, generator=generator(), dtype=torch.float64)


def linear(module, x):
    return x @ module.weight.T + module.bias


def by_hand(mixer, x, h):
    """f', i' and h of every step, one step at a time."""
    f, i = (torch.sigmoid(linear(gate.f, x)) for gate in (mixer.f, mixer.i))
    if mixer.f.r is not None:
        r = torch.sigmoid(linear(mixer.f.r, x))
        f = r * (1 - (1 - f) ** 2) + (1 - r) * f**2
    if mixer.normalize:
        f, i = f / (f + i), i / (f + i)
    candidate = linear(mixer.h, x)
    if mixer.positive:
        candidate = torch.where(candidate >= 0, candidate + 0.5, torch.sigmoid(candidate))
    steps = []
    for t in range(x.shape[1]):
        h = f[:, t] * h + i[:, t] * candidate[:, t]
        steps.append(h)
    return f, i, torch.stack(steps, 1)


def learned_start(mixer):
    """h_0."""
    if mixer.start is None:
        return torch.zeros(mixer.d_state, dtype=torch.float64)
    u = mixer.start
    return torch.where(u >= 0, u + 0.5, torch.sigmoid(u)) if mixer.positive else u


def in_log_space(mixer, x):
    """The paper's parallel form: sums of logarithms, and a logcumsumexp."""
    difference = functional.softplus(-linear(mixer.f.f, x)) - functional.softplus(-linear(mixer.i.f, x))
    log_f, log_i = -functional.softplus(difference), -functional.softplus(-difference)
    u = linear(mixer.h, x)
    log_candidate = torch.where(u >= 0, torch.log(functional.relu(u) + 0.5), -functional.softplus(-u))
    total = log_f.cumsum(1)
    return torch.exp(total + torch.logcumsumexp(log_i + log_candidate - total, 1))


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"d_state": 9, "forget_bias": 2.0},
        {"candidate": "linear", "normalize": False, "refine": True},
        {"refine": True, "uniform_init": True, "d_state": 3},
        {"candidate": "linear", "learned_start": True, "output_projection": True},
        {"normalize": False, "learned_start": True, "output_projection": True},
    ],
)
def test_outputs_state_and_gradients_are_the_papers_equations(arguments):
    mixer, x = make(**arguments).double(), inputs().requires_grad_()
    start = torch.randn(2, mixer.d_state, generator=generator(3), dtype=torch.float64).requires_grad_()
    y, state = mixer(x, start)
    learned = learned_start(mixer)
    *_, h = by_hand(mixer, x, start + learned)
    expected = h if mixer.y is None else linear(mixer.y, h)
    assert_agree((y, state), (expected, h[:, -1] - learned))
    wanted = [x, start, *mixer.parameters()]
    weight = torch.randn(y.shape, generator=generator(5), dtype=y.dtype)
    found = torch.autograd.grad((weight * y).sum(), wanted, retain_graph=True)
    assert_agree(found, torch.autograd.grad((weight * expected).sum(), wanted), "gradients")


def test_the_recurrence_is_the_log_space_form():
    mixer, x = make().double(), inputs()
    assert_agree(mixer(x)[0], in_log_space(mixer, x))
    # gates that are both zero in single precision, where f / (f + i) is not a number
    far = 100 * inputs()
    f, i = (torch.sigmoid(linear(gate.f, far).float()) for gate in (mixer.f, mixer.i))
    assert ((f == 0) & (i == 0)).any()
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
    mixer, x = make(forget_bias=1.0).double(), inputs()
    f, i, _ = by_hand(mixer, x, torch.zeros(2, D, dtype=torch.float64))
    found = mixer.transitions(x)
    assert found.phase is None
    assert_agree(found.magnitude, f)
    assert_agree(mixer.token_mixing(x)[:, 3, 1], (i[:, 1] * f[:, 2] * f[:, 3]).mean(-1))


def test_parameters_state_and_groups():
    assert sum(parameter.numel() for parameter in make().parameters()) == 3 * (D * D + D)
    count = sum(parameter.numel() for parameter in make(d_state=9, refine=True).parameters())
    assert count == 4 * (D * 9 + 9) + 9 * D + D
    assert make().state_size == D and make(d_state=9).state_size == 9
    kept = {name for name, group in groups_of(make(d_state=9)).items() if not group.weight_decay}
    assert kept == {f"{gate}.f.{part}" for gate in "fi" for part in ("weight", "bias")}


def test_a_forget_bias_is_added_to_what_torch_draws():
    plain, biased = make(64), make(64, forget_bias=3.0)
    assert_agree(biased.f.f.bias, plain.f.f.bias + 3)
    assert plain.f.f.bias.std().item() == pytest.approx(1 / 8 / math.sqrt(3), rel=0.2)
    assert torch.equal(biased.i.f.bias, plain.i.f.bias)
    start = biased.transitions(torch.zeros(1, 1, 64)).magnitude
    f, i = torch.sigmoid(biased.f.f.bias), torch.sigmoid(biased.i.f.bias)
    assert_agree(start[0, 0], f / (f + i))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"d_state": 9, "output_projection": False}, "where `d_state` = 9 is not `d_model` = 6; got False"),
        ({"d_state": 0}, "`d_state` must be at least 1; got 0"),
        ({"candidate": "lin"}, "there is no `candidate` 'lin'; did you mean 'linear'"),
    ],
)
def test_argument_errors(arguments, message):
    with pytest.raises(ValueError) as error:
        make(**arguments)
    assert message in str(error.value)
