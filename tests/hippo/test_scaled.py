"""Steps of LegS over all of the past against the bilinear rule and the exact coefficients."""

import pytest
import torch

from linrec.hippo import OnlineApproximation, matrices
from linrec.hippo.scaled import scaled_step
from linrec.testing import assert_agree, generator


def draw(*shape, seed=0):
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)


@pytest.mark.parametrize("order", [1, 2, 40])
def test_a_scaled_step_is_the_bilinear_rule(order):
    x, u, steps = draw(3, 2, order), draw(3, 2, seed=1), torch.tensor([1.0, 2.0, 50.0]).double()
    A, B = matrices("legs", order)
    one = torch.eye(order).double()
    expected = []
    for row in range(3):
        s = 0.5 / steps[row]
        right = x[row] @ (one + s * A).T + 2 * s * u[row][:, None] * B
        expected.append(torch.linalg.solve(one - s * A, right.T).T)
    assert_agree(scaled_step(x, u, steps), torch.stack(expected))


def test_the_memory_is_the_past_of_what_is_remembered():
    """Of a smooth signal, the coefficients by the bilinear rule are near those of the exact one."""
    u = torch.sin(torch.arange(400).double() / 60)[None, :, None]
    c, held = torch.zeros(1, 1, 6).double(), torch.zeros(1).double()
    for t in range(400):
        c, held = scaled_step(c, u[:, t], held), held + 1
    _, exact = OnlineApproximation("legs", 6)(u)
    assert (c - exact.x).abs().max() < 0.01 * exact.x.abs().max()
