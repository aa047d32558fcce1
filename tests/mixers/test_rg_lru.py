"""The RG-LRU against its paper's equations in float64; test_laws.py has the laws."""

import math

import pytest
import torch

from linrec.mixers import build, rg_lru
from linrec.mixers.rg_lru import RGLRU
from linrec.nn import groups_of
from linrec.testing import assert_agree, generator, reset_mask

D, TIME = 6, 9
CASES = {
    "paper": {},
    "released": {"variant": "released"},
    "two blocks": {"n_blocks": 2, "c": 3.0},
    "no recurrence gate": {"recurrence_gate": False, "n_blocks": 3},
    "no input gate": {"input_gate": False, "start": "whole"},
}


def make(d_model: int = D, **arguments) -> RGLRU:
    torch.manual_seed(0)
    mixer = build("rg_lru", d_model, **arguments)
    assert isinstance(mixer, RGLRU)
    return mixer


def moved(mixer: RGLRU) -> RGLRU:
    """The mixer in float64, every parameter away from where it starts: biases are not 0."""
    mixer = mixer.double()
    with torch.no_grad():
        for seed, parameter in enumerate(mixer.parameters()):
            parameter += 0.5 * torch.randn(parameter.shape, generator=generator(seed), dtype=parameter.dtype)
    return mixer


def inputs(time: int = TIME, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, time, D, generator=generator(seed), dtype=torch.float64)


def gate(linear, x):
    if linear is None:
        return torch.ones_like(x)
    return 1 / (1 + torch.exp(-(x @ torch.block_diag(*linear.weight).T + linear.bias)))


def by_hand(mixer, x, h, *, first, c=8.0, reset=None):
    """The file's equations row by row and step by step; `first` says of which rows a sequence begins."""
    a = 1 / (1 + torch.exp(-mixer.Lambda))
    outputs = []
    for row in range(len(x)):
        state, begins, steps = h[row], first, []
        for t, x_t in enumerate(x[row]):
            r, i = gate(mixer.recurrence_gate, x_t), gate(mixer.input_gate, x_t)
            a_t = a ** (c * r)
            if reset is not None and reset[row, t]:
                state, begins = torch.zeros_like(state), True
            root = torch.ones_like(a_t) if begins and mixer.start == "whole" else torch.sqrt(1 - a_t**2)
            state, begins = a_t * state + root * (i * x_t), False
            steps.append(state)
        outputs.append(torch.stack(steps))
    y = torch.stack(outputs)
    return y, y[:, -1]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("first", [True, False])
def test_the_unit_and_its_gradients_are_the_papers_equations(case, first):
    mixer, reset = moved(make(**CASES[case])), reset_mask(2, TIME, rate=0.3)
    x, h = inputs().requires_grad_(), inputs(1, seed=1)[:, 0].requires_grad_()
    if first:
        h = torch.zeros_like(h).requires_grad_()
    state = h
    if mixer.start == "whole":
        state = h, torch.full((2, 1), 0.0 if first else 5.0, dtype=torch.float64)
    y, last = mixer(x, state, reset=reset)
    ours = y, last[0] if mixer.start == "whole" else last
    theirs = by_hand(mixer, x, h, first=first, c=CASES[case].get("c", 8.0), reset=reset)
    assert_agree(ours, theirs)
    wanted = [x, h, *mixer.parameters()]
    cotangents = [torch.randn(tensor.shape, generator=generator(2), dtype=tensor.dtype) for tensor in theirs]
    assert_agree(
        torch.autograd.grad(ours, wanted, cotangents), torch.autograd.grad(theirs, wanted, cotangents)
    )


def test_a_sequence_that_has_not_begun_begins_later():
    mixer, x = moved(make(start="whole")), inputs()
    _, state = mixer(x[:, :0])
    assert_agree(mixer(x, state)[0], mixer(x)[0])
    assert_agree(mixer(x)[0][:, 0], gate(mixer.input_gate, x[:, 0]) * x[:, 0])
    assert mixer(x, state)[1][1].tolist() == [[TIME]] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_root_keeps_its_digits_where_nothing_is_forgotten(dtype):
    """1 - a^2 is 2e-9 here, a tenth of what float32 tells from 1."""
    mixer = make(recurrence_gate=False, input_gate=False, c=1.0).to(dtype)
    with torch.no_grad():
        mixer.Lambda.fill_(math.log(1e9))
    y, _ = mixer(torch.ones(1, 1, D, dtype=dtype))
    torch.testing.assert_close(y, torch.full_like(y, math.sqrt(2e-9)), rtol=1e-5, atol=0)


def test_gradients_are_finite_where_a_transition_is_one():
    mixer = make()
    with torch.no_grad():
        mixer.recurrence_gate.bias.copy_(torch.tensor([-200.0, -80.0, -40.0, 0.0, 40.0, 200.0]))
        mixer.Lambda.copy_(torch.tensor([0.0, 30.0, 100.0, 200.0, 0.0, -200.0]))
    x = inputs().float().requires_grad_()
    y, h = mixer(x)
    (y.square().sum() + h.square().sum()).backward()
    assert all(tensor.isfinite().all() for tensor in (y, h))
    assert all(tensor.grad.isfinite().all() for tensor in (x, *mixer.parameters()))


def test_states_of_white_noise_keep_its_variance():
    mixer = make(64, input_gate=False, recurrence_gate=False, a_init=(0.9, 0.99), c=1.0)
    with torch.no_grad():
        y, _ = mixer(torch.randn(8, 4000, 64, generator=generator()))
    # the longest memory is of a hundred steps
    assert y[:, 1000:].var().item() == pytest.approx(1.0, abs=0.05)


def largest_gap(sample, low, high):
    """Kolmogorov's distance between a sample and the uniform distribution on [low, high]."""
    found = (sample.detach().double().sort().values - low) / (high - low)
    steps = torch.arange(len(found) + 1) / len(found)
    return float(torch.maximum((found - steps[:-1]).abs(), (found - steps[1:]).abs()).max())


def test_transitions_start_as_the_released_code_and_as_the_paper():
    n = 4096
    bound = 1.63 / math.sqrt(n)
    for arguments in ({"variant": "released"}, {"a_init_of": "a"}):
        a = torch.sigmoid(make(n, **arguments).Lambda.double())
        assert largest_gap(a**2, 0.9**2, 0.999**2) < bound
    for arguments in ({}, {"variant": "released", "a_init_of": "a^c"}):
        a = torch.sigmoid(make(n, **arguments).Lambda.double())
        assert largest_gap(a**8, 0.9, 0.999) < bound
    a = torch.sigmoid(make(n, a_init_of="a^c", c=2.0, a_init=(0.3, 0.5)).Lambda.double())
    assert largest_gap(a**2, 0.3, 0.5) < bound


def test_an_argument_beside_the_variant_is_obeyed():
    assert (make().start, make(variant="released").start) == ("scaled", "whole")
    assert make(variant="released", start="scaled").start == "scaled"


def test_gates_start_normal_without_biases():
    mixer = make(512, n_blocks=2)
    for linear in (mixer.recurrence_gate, mixer.input_gate):
        assert linear.weight.std().item() == pytest.approx(1 / 16, rel=0.01)
        assert (linear.bias == 0).all()
    # with an input of zero both are at one half
    log_a = 4 * torch.log(torch.sigmoid(mixer.Lambda))
    assert_agree(mixer.transitions(torch.zeros(1, 1, 512)).magnitude[0, 0], log_a.exp())


def test_blocks_and_parameter_counts():
    assert {d: len(make(d).input_gate.weight) for d in (4, 6, 64, 100, 2560)} == {
        4: 4,
        6: 6,
        64: 16,
        100: 10,
        2560: 16,
    }
    # two block-diagonal matrices with biases, and Lambda
    assert sum(p.numel() for p in make(64).parameters()) == 2 * (64 * 4 + 64) + 64
    assert sum(p.numel() for p in make(64, n_blocks=1).parameters()) == 2 * (64 * 64 + 64) + 64
    assert sum(p.numel() for p in make(recurrence_gate=False, input_gate=False).parameters()) == D


def test_what_controls_the_transition_is_marked():
    groups = groups_of(make())
    marked = {name for name, group in groups.items() if group.name == "transition"}
    assert marked == {"Lambda", "recurrence_gate.weight", "recurrence_gate.bias"}
    assert not any(groups[name].weight_decay for name in marked)


@pytest.mark.parametrize("case", ["paper", "released"])
def test_token_mixing_is_what_the_input_is_multiplied_by(case, monkeypatch):
    mixer, x, reset = moved(make(**CASES[case])), inputs(), reset_mask(2, TIME, rate=0.3)
    mixing = mixer.token_mixing(x, reset=reset)
    # the gates are held while the input of one step changes
    held = mixer.recurrence_gate(x), mixer.input_gate(x)
    monkeypatch.setattr(rg_lru, "block_projected", lambda x, *gates: held)
    for m in range(TIME):
        impulse = (torch.arange(TIME) == m).double()[None, :, None].expand_as(x)
        assert_agree(mixing[..., m], mixer(impulse, reset=reset)[0].mean(-1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_blocks": 4}, "`n_blocks` must be a positive divisor of the width of the state = 6; got 4"),
        ({"n_blocks": 0}, "got 0"),
        ({"c": 0.0}, "`c` must be positive and finite; got 0.0"),
        ({"c": float("inf")}, "`c` must be a finite number; got inf"),
        ({"a_init": (0.9, 1.0)}, "`a_init` must be (low, high) with 0 < low <= high < 1; got (0.9, 1.0)"),
        ({"a_init": (0.9, 0.8)}, "got (0.9, 0.8)"),
        ({"a_init_of": "a_c"}, "there is no `a_init_of` 'a_c'; did you mean 'a^c'"),
        ({"variant": "release"}, "there is no `variant` 'release'; did you mean 'released'"),
        ({"start": "scale"}, "there is no `start` 'scale'; did you mean 'scaled'"),
    ],
)
def test_argument_errors(arguments, message):
    with pytest.raises(ValueError) as error:
        make(**arguments)
    assert message in str(error.value)
