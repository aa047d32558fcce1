"""Forward propagation through time, against its equations written out, in float64."""

import pytest
import torch
from torch import nn

from linrec.learning import build_learner
from tests.learning.test_learners import assert_equal, mixer_of, stream


class Slope(nn.Module):
    """y = w x, whose squared error is a parabola in w."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def init_state(self, batch, *, device=None):
        return torch.zeros(batch, 1, device=device)

    def forward(self, x, state=None, *, reset=None):
        return self.w * x, state


def test_the_dual_is_the_instantaneous_gradient_where_the_inner_problem_is_solved():
    model, (x, y, _) = Slope(), stream(width=1, rows=1, steps=8, resets=False)
    for alpha in (0.5, 2.0):
        learner = build_learner("fptt", model, torch.optim.SGD(model.parameters(), lr=1.0), alpha=alpha)
        for t in range(8):
            # a step of 1 / curvature solves the problem of a parabola
            learner.optimizers[0].param_groups[0]["lr"] = 1 / (2 * x[0, t, 0] ** 2 + alpha)
            learner.step(x[:, t], y[:, t])
            gradient = 2 * x[0, t, 0] * (model.w * x[0, t, 0] - y[0, t, 0])
            assert learner.duals()["w"].item() == pytest.approx(gradient.item(), rel=1e-10)


def test_updates_are_those_of_the_augmented_loss():
    alpha, beta, mixer, (x, y, _) = 0.4, 0.25, mixer_of("gru"), stream(steps=12, resets=False)
    twin = mixer_of("gru")
    learner = build_learner(
        "fptt", mixer, torch.optim.Adam(mixer.parameters(), lr=0.01), alpha=alpha, beta=beta
    )
    optimizer, state = torch.optim.Adam(twin.parameters(), lr=0.01), None
    means = {name: p.detach().clone() for name, p in twin.named_parameters()}
    duals = {name: torch.zeros_like(p) for name, p in means.items()}
    for start in range(0, 12, 4):
        now = slice(start, start + 4)
        learner.chunk(x[:, now], y[:, now])
        prediction, state = twin(x[:, now], state)
        state = state.detach()
        loss = (prediction - y[:, now]).square().mean()
        for name, p in twin.named_parameters():
            loss = loss - (p * duals[name]).sum() + alpha / 2 * (p - means[name]).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for name, p in twin.named_parameters():
            duals[name] = duals[name] - alpha * (p.detach() - means[name])
            means[name] = (1 - beta) * means[name] + beta * p.detach() - beta / alpha * duals[name]
    assert_equal(learner.duals(), duals)
    assert_equal(learner.means(), means)
    assert_equal(dict(mixer.named_parameters()), dict(twin.named_parameters()))


def test_without_the_regulariser_it_is_truncated_backpropagation():
    made = []
    for name, options in (("fptt", {"alpha": 0.0}), ("tbptt", {})):
        mixer, (x, y, reset) = mixer_of("gru"), stream()
        learner = build_learner(name, mixer, torch.optim.Adam(mixer.parameters()), update_every=4, **options)
        learner.chunk(x, y, reset)
        made.append(dict(mixer.named_parameters()))
    assert_equal(*made)
