"""The HiPPO-RNN against its equations in float64, step by step; test_laws.py has the laws."""

import math

import pytest
import torch

from linrec.hippo import matrices
from linrec.mixers import build
from linrec.mixers.hippo_rnn import HiPPORNN, HiPPOState
from linrec.nn import groups_of
from linrec.testing import assert_agree, generator, reset_mask

D, N, TIME = 4, 5, 9
CASES = {
    "paper": {},
    "released": {"variant": "released", "d_memory": 2},
    "released LegT": {"variant": "released", "measure": "legt", "window": 6.0, "discretization": "zoh"},
    "LagT": {"measure": "lagt", "window": 3.0, "gate": False},
    "LegS that forgets": {"measure": "legs", "window": 4.0, "d_memory": 2, "refine": True},
}
every_case = pytest.mark.parametrize("case", CASES)


def make(d_model: int = D, **arguments) -> HiPPORNN:
    torch.manual_seed(0)
    mixer = build("hippo_rnn", d_model, **({"order": N} | arguments))
    assert isinstance(mixer, HiPPORNN)
    return mixer


def moved(mixer: HiPPORNN) -> HiPPORNN:
    """In float64, every parameter away from where it starts."""
    mixer = mixer.double()
    with torch.no_grad():
        for seed, parameter in enumerate(mixer.parameters()):
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator(seed), dtype=parameter.dtype)
    return mixer


def draw(*shape, seed=0):
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)


def system(mixer, k):
    """A and B of the step after k samples, of the papers' formulas."""
    A, B = matrices(mixer.measure, mixer.order)
    one = torch.eye(mixer.order).double()
    if mixer.window is None and k == 0:
        return 0 * A, one[0]
    size = 1 / (k if mixer.window is None else mixer.window)
    if mixer.discretization == "zoh":
        Abar = torch.linalg.matrix_exp(size * A)
        return Abar, torch.linalg.solve(A, (Abar - one) @ B)
    inverse = torch.linalg.inv(one - size / 2 * A)
    return inverse @ (one + size / 2 * A), inverse @ B * size


def tau(mixer, h, seen):
    z = torch.tanh(seen @ mixer.z.weight.T + mixer.z.bias)
    if mixer.g is None:
        return z
    g = torch.sigmoid(seen @ mixer.g.f.weight.T + mixer.g.f.bias)
    if mixer.g.r is not None:
        r = torch.sigmoid(seen @ mixer.g.r.weight.T + mixer.g.r.bias)
        g = r * (1 - (1 - g) ** 2) + (1 - r) * g**2
    return (1 - g) * h + g * z


def by_hand(mixer, x, h, c, k, reset, released):
    """The equations row by row and step by step; k samples are in the memory at the start."""
    outputs, states, memories = [], [], []
    for row in range(len(x)):
        h_t, c_t, held, steps = h[row], c[row], k, []
        for t, x_t in enumerate(x[row]):
            if reset[row, t]:
                h_t, c_t, held = 0 * h_t, 0 * c_t, 0
            A, B = system(mixer, held)
            if released:
                f = torch.cat([x_t, h_t]) @ mixer.f.weight.T + mixer.f.bias
                c_t = c_t @ A.T + torch.outer(f, B)
                h_t = tau(mixer, h_t, torch.cat([x_t, c_t.flatten()]))
            else:
                h_t = tau(mixer, h_t, torch.cat([x_t, c_t.flatten(), h_t]))
                c_t = c_t @ A.T + torch.outer(h_t @ mixer.f.weight.T + mixer.f.bias, B)
            held += 1
            steps.append(h_t)
        outputs.append(torch.stack(steps))
        states.append(h_t)
        memories.append(c_t)
    return torch.stack(outputs), torch.stack(states), torch.stack(memories)


@every_case
@pytest.mark.parametrize("k", [0, 3])
def test_the_cell_and_its_gradients_are_its_equations(case, k):
    mixer, reset = moved(make(**CASES[case])), reset_mask(2, TIME, rate=0.2)
    x, h, c = (part.requires_grad_() for part in (draw(2, TIME, D), draw(2, D), draw(2, mixer.d_memory, N)))
    steps = torch.full((2, 1), float(k), dtype=torch.float64) if mixer.window is None else None
    y, state = mixer(x, HiPPOState(h, c, steps), reset=reset)
    theirs = by_hand(mixer, x, h, c, k, reset, CASES[case].get("variant") == "released")
    ours = y, state.h, state.c
    assert_agree(ours, theirs)
    wanted = [x, h, c, *mixer.parameters()]
    cotangents = [draw(*tensor.shape, seed=2) for tensor in theirs]
    assert_agree(
        torch.autograd.grad(ours, wanted, cotangents, allow_unused=True, materialize_grads=True),
        torch.autograd.grad(theirs, wanted, cotangents, allow_unused=True, materialize_grads=True),
    )


@every_case
def test_parameters_and_where_they_start(case):
    arguments = CASES[case]
    mixer = make(64, **(arguments | {"order": 48}))
    memory, rest = 48 * mixer.d_memory, 0 if arguments.get("variant") == "released" else 64
    parts = mixer.z.weight.split([64, memory, *([rest] if rest else [])], 1)
    for part in parts:
        # Xavier's normal
        assert part.std().item() == pytest.approx(math.sqrt(2 / sum(part.shape)), rel=0.05)
    inputs = mixer.z.in_features
    assert inputs == 64 + memory + rest
    for linear in [] if mixer.g is None else [part for part in (mixer.g.f, mixer.g.r) if part is not None]:
        assert linear.weight.std().item() == pytest.approx(inputs**-0.5, rel=0.05)
        assert linear.bias.abs().max() <= inputs**-0.5
    # LeCun's uniform
    assert mixer.f.in_features == 128 - rest
    largest = math.sqrt(3 / mixer.f.in_features)
    assert 0.9 * largest < mixer.f.weight.abs().max() <= largest
    marked = {name for name, group in groups_of(mixer).items() if group.name == "transition"}
    assert marked == {name for name, _ in mixer.named_parameters() if name.startswith("g.")}


def test_state_sizes():
    assert make().state_size == D + N + 1
    assert make(order=None).state_size == 2 * D + 1
    assert make(measure="legt", window=7.0, d_memory=3).state_size == D + 3 * N


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"measure": "legz"}, "there is no `measure` 'legz'; did you mean 'legs'"),
        ({"variant": "release"}, "there is no `variant` 'release'; did you mean 'released'"),
        ({"discretization": "zho"}, "did you mean 'zoh'"),
        ({"order": 0}, "`order` must be at least 1; got 0"),
        ({"d_memory": 0}, "`d_memory` must be at least 1; got 0"),
        ({"window": 0.0}, "`window` must be positive and finite; got 0.0. It is a number of steps."),
        ({"measure": "legt"}, "`window` must be a number of steps with measure='legt'"),
        ({"discretization": "zoh"}, 'Without a window there is "legs" with "bilinear" steps.'),
    ],
)
def test_argument_errors(arguments, message):
    with pytest.raises(ValueError) as error:
        make(**arguments)
    assert message in str(error.value)
