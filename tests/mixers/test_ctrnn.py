"""CTRNN: its equation neuron by neuron, the limits of its solvers, and its relation to Elman's network."""

import math

import pytest
import torch

from linrec.mixers import build
from linrec.nn import groups_of
from linrec.testing import assert_agree, generator

D = 4


def make(**arguments):
    torch.manual_seed(0)
    mixer = build("ctrnn", D, **arguments).double()
    with torch.no_grad():
        mixer.log_tau += 0.3 * torch.randn(D, generator=generator(3))
    return mixer, torch.randn(2, 5, D, generator=generator(), dtype=torch.float64)


def slopes(mixer, of_x):
    """tau and the right side of the equation, neuron by neuron, for one input."""
    W, U, b, tau = (p.detach() for p in (mixer.W.weight, mixer.U.weight, mixer.U.bias, mixer.log_tau.exp()))

    def f(h):
        found = []
        for i in range(D):
            drive = sum(float(U[i, j]) * float(of_x[j]) for j in range(D)) + float(b[i])
            if mixer.variant == "rate":
                drive = math.tanh(drive + sum(float(W[i, j]) * h[j] for j in range(D)))
            else:
                drive += sum(float(W[i, j]) * math.tanh(h[j]) for j in range(D))
            found.append((drive - h[i]) / float(tau[i]))
        return found

    return f


@pytest.mark.parametrize("variant", ["rate", "potential"])
def test_solvers_agree_on_the_path_of_the_equation(variant):
    found = []
    for solver, n_steps in (("rk4", 8), ("midpoint", 800)):
        mixer, x = make(variant=variant, solver=solver, n_steps=n_steps)
        dt = 0.1 + torch.rand(2, 5, generator=generator(1), dtype=torch.float64)
        found.append(mixer(x, dt=dt)[0])
    assert (found[0] - found[1]).abs().max() < 1e-5


@pytest.mark.parametrize("variant", ["rate", "potential"])
def test_a_step_of_eulers_method_follows_the_slope(variant):
    mixer, x = make(variant=variant, n_steps=1)
    h = torch.randn(2, D, generator=generator(2), dtype=torch.float64)
    _, state = mixer(x[:, :1], h, dt=torch.full((2, 1), 0.2, dtype=torch.float64))
    for row in range(2):
        f = torch.tensor(slopes(mixer, x[row, 0])(h[row].tolist()), dtype=torch.float64)
        assert_agree(state[row], h[row] + 0.2 * f)


def test_one_step_at_a_time_constant_of_one_is_an_elman_network():
    torch.manual_seed(0)
    mixer, elman = build("ctrnn", D, n_steps=1).double(), build("elman", D).double()
    with torch.no_grad():
        weights = mixer.U.weight, mixer.W.weight, mixer.U.bias, torch.zeros(D)
        for own, given in zip(elman.rnn.parameters(), weights, strict=True):
            own.copy_(given)
    x = torch.randn(2, 5, D, generator=generator(), dtype=torch.float64)
    assert_agree(mixer(x), elman(x))


def test_time_constants_are_learned_and_marked():
    mixer = build("ctrnn", D, tau=2.5)
    assert torch.allclose(mixer.log_tau.exp(), torch.full((D,), 2.5))
    assert groups_of(mixer)["log_tau"].name == "transition" and not groups_of(mixer)["log_tau"].weight_decay
    assert not build("ctrnn", D, learn_tau=False).log_tau.requires_grad
    assert sum(p.numel() for p in mixer.parameters()) == 2 * D * D + 2 * D


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tau": 0.0}, "`tau` must be positive"),
        ({"n_steps": 0}, "`n_steps` must be at least 1; got 0"),
        ({"variant": "rates"}, "did you mean 'rate'"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        build("ctrnn", D, **arguments)
