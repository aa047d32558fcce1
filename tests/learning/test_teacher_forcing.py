"""Generalised teacher forcing against its equations, in float64."""

import pytest
import torch

from linrec import mixers
from linrec.learning import ShallowPLRNN, build_learner
from tests.learning.test_learners import assert_equal


def network_of(**options):
    torch.manual_seed(0)
    return ShallowPLRNN(3, 3, hidden=7, **options).double()


@pytest.mark.parametrize("clipped", [False, True])
def test_gradients_are_those_of_the_forced_recurrence(clipped):
    network, x = network_of(clipped=clipped), torch.randn(2, 9, 3, dtype=torch.float64)
    learner = build_learner("gtf", network, alpha=0.3)
    reset = torch.zeros(2, 8, dtype=torch.bool).index_fill(1, torch.tensor(5), True)
    learner.chunk(x[:, :-1], x[:, 1:], reset)
    A, W_1, W_2, h_1, h_2 = network.parameters()
    z, loss = None, 0
    for t in range(8):
        forced = x[:, t] if t in (0, 5) else 0.3 * x[:, t] + 0.7 * z
        inner = forced @ W_2.T
        rectified = (inner + h_2).relu() - (inner.relu() if clipped else 0)
        z = A * forced + rectified @ W_1.T + h_1
        loss = loss + (z - x[:, t + 1]).square().mean(1).sum()
    names = [name for name, _ in network.named_parameters()]
    expected = torch.autograd.grad(loss, [*network.parameters()])
    assert_equal(learner.gradients(), dict(zip(names, expected, strict=True)))


@pytest.mark.parametrize("clipped", [False, True])
def test_the_jacobian_of_a_forced_step_is_that_of_a_free_one_times_one_minus_alpha(clipped):
    network, x, z = network_of(clipped=clipped), *torch.randn(2, 3, dtype=torch.float64)
    network.alpha.fill_(0.3)
    begun = {"begun": torch.ones(1, dtype=torch.bool)}
    forced = torch.autograd.functional.jacobian(
        lambda z: network(x[None, None], begun | {"z": z[None]})[0][0, 0], z
    )
    at = 0.3 * x + 0.7 * z
    free = torch.autograd.functional.jacobian(network.step, at)
    assert torch.allclose(forced, 0.7 * free, rtol=1e-12)
    assert torch.allclose(network.jacobians(at), free, rtol=1e-12)


def test_alpha_follows_the_norms_up_at_once_and_down_slowly():
    network, x = network_of(), torch.randn(2, 9, 3, dtype=torch.float64)
    with torch.no_grad():
        network.A.fill_(3.0)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
    learner = build_learner("gtf", network, optimizer, alpha=0.1, adaptive=True, gamma=0.9, every=2)
    assert float(network.alpha) == pytest.approx(0.1)

    def follow():
        norms = torch.linalg.svdvals(network.jacobians(x[:, :-1]).detach())[..., 0]
        return 1 - 1 / float(norms.prod(1).pow(1 / 8).max())

    learner.chunk(x[:, :-1], x[:, 1:])
    assert float(network.alpha) == pytest.approx(0.1)
    learner.chunk(x[:, :-1], x[:, 1:])
    up = follow()
    assert float(network.alpha) == pytest.approx(up) and up > 0.5
    with torch.no_grad():
        network.A.fill_(1.6)
    for _ in range(2):
        learner.chunk(x[:, :-1], x[:, 1:])
    down = follow()
    assert down < up and float(network.alpha) == pytest.approx(0.9 * up + 0.1 * down)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="`n_outputs`"):
        ShallowPLRNN(3, 2)
    with pytest.raises(ValueError, match="`alpha`"):
        build_learner("gtf", network_of(), alpha=1.5)
    with pytest.raises(ValueError, match="ShallowPLRNN"):
        build_learner("gtf", mixers.build("gru", 4))
