"""Hebbian rules against their equations, and the eigenvectors that they find."""

import pytest
import torch

from linrec.learning import build_learner
from tests.learning.test_learners import assert_equal, mixer_of, stream

RULES = {
    "hebb": lambda W, x, y, m: torch.outer(y, x),
    "oja": lambda W, x, y, m: torch.outer(y, x) - (y**2)[:, None] * W,
    "sanger": lambda W, x, y, m: torch.outer(y, x) - torch.outer(y, y).tril() @ W,
    "covariance": lambda W, x, y, m: torch.outer(y - m["y"], x - m["x"]),
    "bcm": lambda W, x, y, m: torch.outer(y * (y - m["y2"]), x),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("modulated", [False, True])
def test_weights_between_states_follow_the_rule(rule, modulated):
    mixer, (x, y, _) = mixer_of("elman"), stream(rows=1, steps=10, resets=False)
    learner = build_learner("hebb", mixer, rule=rule, kappa=0.7, modulated=modulated, decay=0.9)
    W, U, b, c = (p.detach() for p in mixer.rnn.parameters())
    h, e, total = torch.zeros(4, dtype=torch.float64), 0, 0
    mean, baseline = {name: torch.zeros(4, dtype=torch.float64) for name in ("x", "y", "y2")}, 0.0
    for t in range(10):
        before, h = h, torch.tanh(W @ x[0, t] + b + U @ h + c)
        now = {"x": before, "y": h, "y2": h**2}
        mean = {name: 0.9 * mean[name] + 0.1 * now[name] for name in mean}
        e = 0.7 * e + RULES[rule](U, before, h, mean)
        loss = (h - y[0, t]).square().mean()
        total = total - (baseline - loss if modulated else 1.0) * e
        baseline = 0.9 * baseline + 0.1 * loss
        learner.step(x[:, t], y[:, t])
    # the baseline is float32
    assert_equal(learner.gradients(), {"rnn.weight_hh_l0": total}, tolerance=1e-6 if modulated else 1e-10)
    assert not learner.gradients()["rnn.bias_ih_l0"].any()


@pytest.mark.parametrize("rule", ["oja", "sanger"])
def test_products_find_principal_eigenvectors_in_order(rule):
    torch.manual_seed(0)
    mixer = mixer_of("elman")
    torch.nn.init.zeros_(mixer.rnn.bias_ih_l0)
    basis = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))[0]
    scales = torch.tensor([2.0, 1.6, 1.2, 0.8], dtype=torch.float64)
    learner = build_learner(
        "hebb", mixer, torch.optim.SGD([mixer.rnn.weight_ih_l0], lr=0.1), rule=rule, post="product"
    )
    # two inputs per eigenvector have the covariance basis scales^2 basis^T
    x = torch.cat([2 * scales[:, None] * basis.T, -2 * scales[:, None] * basis.T])
    for _ in range(400):
        learner.chunk(x[:, None], torch.zeros(8, 1, 4))
    W = mixer.rnn.weight_ih_l0.detach()
    along = (W @ basis).abs()
    expected = torch.eye(4, dtype=torch.float64) if rule == "sanger" else torch.eye(4)[[0, 0, 0, 0]].double()
    assert (along - expected).abs().max() < 1e-3


def test_gates_need_products_as_what_is_behind():
    with pytest.raises(ValueError, match="'product'"):
        build_learner("hebb", mixer_of("gru"))
