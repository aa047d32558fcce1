import pytest
import torch

from linrec.mixers import build
from linrec.testing import assert_agree, generator


@pytest.mark.parametrize("implicit", [False, True])
def test_outputs_and_state_are_the_papers_equations(implicit):
    torch.manual_seed(0)
    dt, gamma, epsilon = 0.06, 66.0, 15.0
    mixer = build("cornn", 5, dt=dt, gamma=gamma, epsilon=epsilon, implicit=implicit).double()
    x = 3 * torch.randn(2, 30, 5, generator=generator(0), dtype=torch.float64)
    Wc, W = mixer.W.weight.chunk(2, 1)
    z = y = torch.zeros(2, 5, dtype=x.dtype)
    steps = []
    for t in range(30):
        push = torch.tanh(y @ W.T + z @ Wc.T + x[:, t] @ mixer.V.weight.T + mixer.V.bias)
        old, force = z, push - gamma * y
        # the damping is of the new z: z = old + dt (force - epsilon z)
        z = (old + dt * force) / (1 + dt * epsilon) if implicit else old + dt * (force - epsilon * old)
        if implicit:
            assert_agree(z, old + dt * (force - epsilon * z))
        y = y + dt * z
        steps.append(y)
    found, state = mixer(x)
    assert_agree((found, state), (torch.stack(steps, 1), torch.cat([z, y], -1)))


def test_initial_values_are_those_of_one_linear_of_all_inputs():
    torch.manual_seed(0)
    mixer, linear = build("cornn", 100), torch.nn.Linear(300, 100)
    assert sum(p.numel() for p in mixer.parameters()) == sum(p.numel() for p in linear.parameters())
    for weight in mixer.parameters():
        assert 0.95 * 300**-0.5 < weight.abs().max() <= 300**-0.5
    assert mixer.W.weight.std().item() == pytest.approx(linear.weight.std().item(), rel=0.02)
