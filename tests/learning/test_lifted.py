"""Lifted training against backpropagation through time, in float64."""

import pytest
import torch

from linrec.learning import build_learner
from linrec.learning.lifted import CONSTRAINTS
from tests.learning.test_learners import assert_equal, learnt, mixer_of, stream

STEPS = 8


def deltas(mixer, x, y, reset):
    """Return the forward states, and the derivatives of the loss by them."""
    h, states = torch.zeros(2, 4, dtype=torch.float64), []
    W, U, b, c = mixer.rnn.parameters()
    for t in range(STEPS):
        h = torch.where(reset[:, t, None], 0, h)
        h = torch.tanh(x[:, t] @ W.T + b + h @ U.T + c)
        h.retain_grad()
        states.append(h)
    (torch.stack(states, 1) - y).square().mean(2).sum().backward()
    return torch.stack(states, 1).detach(), torch.stack([h.grad for h in states], 1)


@pytest.mark.parametrize(
    "options",
    [
        {"method": "lagrangian", "rho": 2.0},
        {"method": "local_propagation", "rho": 0.0},
        {"method": "local_propagation"},
    ],
)
def test_at_the_forward_states_multipliers_are_deltas_and_nothing_moves(options):
    mixer, given = mixer_of("elman"), stream(steps=STEPS)
    exact = learnt(build_learner("bptt", mixer), *given, STEPS)
    x, delta = deltas(mixer, *given)
    learner = build_learner("lifted", mixer, **options)
    learner.memory = learner.first_memory(2, torch.device("cpu")) | {
        "x": {"": x},
        "multipliers": {"": -delta},
    }
    learner.chunk(*given)
    assert (learner.memory["x"][""] - x).abs().max() < 1e-14
    assert (learner.memory["multipliers"][""] + delta).abs().max() < 1e-14
    assert_equal(learner.gradients(), exact)


def test_without_a_loss_a_penalty_keeps_the_forward_states():
    mixer, (x, _, reset) = mixer_of("gru"), stream(steps=STEPS)
    learner = build_learner("lifted", mixer, method="penalty")
    learner.chunk(x, mixer(x, reset=reset)[0].detach(), reset)
    assert all(not g.abs().max() > 1e-14 for g in learner.gradients().values())


def test_states_descend_the_penalised_loss():
    mixer, (x, y, reset) = mixer_of("elman"), stream(steps=STEPS)
    learner = build_learner("lifted", mixer, method="penalty", rho=3.0, rate=0.05, sweeps=1)
    states, _ = deltas(mixer, x, y, reset)
    free = (states + 0.1).requires_grad_()
    learner.memory = learner.first_memory(2, torch.device("cpu"))
    learner.memory |= {"x": {"": free.detach()}, "multipliers": {"": torch.zeros_like(free.detach())}}
    W, U, b, c = mixer.rnn.parameters()
    before = torch.cat([torch.zeros(2, 1, 4), free[:, :-1]], 1) * ~reset[:, :, None]
    r = free - torch.tanh(x @ W.T + b + before @ U.T + c)
    total = (free - y).square().mean(2).sum() + 1.5 * r.square().sum()
    (by,) = torch.autograd.grad(total, free)
    learner.chunk(x, y, reset)
    assert_equal(learner.memory["x"], {"": free.detach() - 0.05 * by})


def test_from_scratch_states_come_to_follow_the_recurrence():
    mixer, (x, _, reset) = mixer_of("elman"), stream(steps=STEPS)
    target = mixer_of("elman", init="orthogonal")(x, reset=reset)[0].detach()
    optimizer = torch.optim.Adam(mixer.parameters(), lr=0.02)
    learner = build_learner("lifted", mixer, optimizer, rate=0.2, rho=1.0)
    for _ in range(150):
        lifted = learner.chunk(x, target, reset).loss.mean()
    states, _ = deltas(mixer, x, target, reset)
    assert (learner.memory["x"][""] - states).abs().max() < 1e-2
    loss = (states - target).square().mean()
    assert abs(loss - lifted) < 1e-2 and loss < 0.01


@pytest.mark.parametrize("constraint", ["lin", "abs", "eps", "lineps", "squared", "cubic"])
def test_constraints_are_zero_on_the_recurrence_alone(constraint):
    r = torch.tensor([-0.3, -0.0005, 0.0, 0.2])
    found = CONSTRAINTS[constraint](r, 1e-3)
    expected = {
        "lin": [-0.3, -0.0005, 0, 0.2],
        "abs": [0.3, 0.0005, 0, 0.2],
        "eps": [0.299, 0, 0, 0.199],
        "lineps": [-0.299, 0, 0, 0.199],
        "squared": [0.09, 2.5e-7, 0, 0.04],
        "cubic": [-0.027, -1.25e-10, 0, 0.008],
    }[constraint]
    assert torch.allclose(found, torch.tensor(expected), atol=1e-9)


@pytest.mark.parametrize("method", ["lagrangian", "local_propagation"])
def test_multipliers_ascend_the_residual(method):
    mixer, (x, y, reset) = mixer_of("elman"), stream(steps=STEPS)
    learner = build_learner("lifted", mixer, method=method, rho=0.5, ascent=0.3, sweeps=1, constraint="cubic")
    states, _ = deltas(mixer, x, y, reset)
    free = states + 0.2 * torch.randn_like(states)
    learner.memory = learner.first_memory(2, torch.device("cpu"))
    learner.memory |= {"x": {"": free}, "multipliers": {"": torch.zeros_like(free)}}
    W, U, b, c = (p.detach() for p in mixer.rnn.parameters())
    before = torch.cat([torch.zeros(2, 1, 4), free[:, :-1]], 1) * ~reset[:, :, None]
    r = free - torch.tanh(x @ W.T + b + before @ U.T + c)
    learner.chunk(x, y, reset)
    expected = 0.5 * r if method == "lagrangian" else 0.3 * r**3
    assert_equal(learner.memory["multipliers"], {"": expected})
