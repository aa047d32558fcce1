import torch

from linrec.mixers import build
from linrec.nn import groups_of
from linrec.testing import assert_agree, generator

D = 6


def make(**arguments):
    torch.manual_seed(0)
    return build("irnn", D, **arguments).double()


def test_outputs_are_the_papers_equations():
    """One entry at a time."""
    mixer = make(n_steps=3, alpha=0.7, activation="tanh", std=0.5)
    with torch.no_grad():
        mixer.eta.copy_(torch.tensor([0.1, 0.3, 0.5], dtype=torch.float64))
    x = torch.randn(1, 4, D, generator=generator(), dtype=torch.float64)
    W, b, U = mixer.W.weight, mixer.W.bias, mixer.U.weight
    h, expected = torch.zeros(D, dtype=torch.float64), []
    for x_t in x[0]:
        g = torch.zeros(D, dtype=torch.float64)
        for eta in (0.1, 0.3, 0.5):
            s = g + h
            slope = [torch.tanh(U[j].dot(s) + W[j].dot(x_t) + b[j]) - 0.7 * s[j] for j in range(D)]
            g = g + eta * torch.stack(slope)
        h = g
        expected.append(h)
    assert_agree(mixer(x), (torch.stack(expected)[None], h[None]))


def test_the_jacobian_at_the_equilibrium_is_minus_one():
    mixer = make(n_steps=200, eta_init=0.3)
    x = torch.randn(1, 1, D, generator=generator(), dtype=torch.float64)
    start = torch.randn(1, D, generator=generator(1), dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda h: mixer(x, h)[1][0], start)[:, 0]
    assert_agree(jacobian, -torch.eye(D, dtype=torch.float64))


def test_initial_values():
    torch.manual_seed(0)
    mixer = build("irnn", 128, n_steps=4)
    assert torch.equal(mixer.eta, torch.full((4,), 0.25))
    assert not mixer.W.bias.any()
    for weight in (mixer.W.weight, mixer.U.weight):
        torch.testing.assert_close(weight.std(), torch.tensor(0.1), rtol=0.05, atol=0)
    assert groups_of(mixer)["eta"].name == "transition"
