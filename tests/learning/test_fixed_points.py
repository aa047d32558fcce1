"""Recurrent backpropagation against a dense solve and long unrolls, in float64."""

import pytest
import torch

from linrec.learning import build_learner
from tests.learning.test_learners import assert_equal, mixer_of, stack_of

STEPS = 120
SOLVERS = [
    ("rbp", {"tolerance": 1e-14, "iterations": 1000}),
    ("rbp_cg", {"tolerance": 1e-14}),
    ("rbp_neumann", {"terms": 300}),
]


def at_rest(rows=2):
    """Return constant inputs, targets of the last step, and their weights."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, rows, 1, 4, dtype=torch.float64, generator=generator)
    weight = (torch.arange(STEPS) == STEPS - 1).double().expand(rows, STEPS)
    return x.expand(rows, STEPS, 4), y.expand(rows, STEPS, 4), weight


def gradients(name, mixer, x, y, weight, **options):
    learner = build_learner(name, mixer, **options)
    learner.chunk(x, y, weight=weight)
    return learner.gradients()


@pytest.mark.parametrize("name, options", SOLVERS)
def test_gradients_are_those_of_a_long_unroll_and_of_a_dense_solve(name, options):
    mixer, given = mixer_of("elman"), at_rest()
    found = gradients(name, mixer, *given, **options)
    assert_equal(found, gradients("bptt", mixer, *given))
    x, y, _ = given
    U = mixer.rnn.weight_hh_l0.detach()
    total = torch.zeros(4, 4, dtype=torch.float64)
    for h, target in zip(mixer(x)[1].detach(), y[:, -1], strict=True):
        D = 1 - h**2
        z = torch.linalg.solve((torch.eye(4) - D[:, None] * U).T, (h - target) / 2)
        total += torch.outer(z * D, h)
    assert_equal(found, {"rnn.weight_hh_l0": total})


@pytest.mark.parametrize("terms", [0, 1, 5])
def test_terms_of_neumann_are_steps_of_truncated_backpropagation(terms):
    mixer, (x, y, weight) = mixer_of("gru"), at_rest()
    state = mixer(x.repeat(1, 10, 1))[1].detach()
    expected = build_learner("tbptt", mixer, window=terms + 1)
    expected.memory = {"state": state}
    expected.chunk(x[:, : terms + 1], y[:, : terms + 1], weight=weight[:, -terms - 1 :])
    found = build_learner("rbp_neumann", mixer, terms=terms)
    found.memory = found.first_memory(2, torch.device("cpu")) | {"state": state}
    found.chunk(x[:, :1], y[:, :1])
    assert_equal(found.gradients(), expected.gradients())


def test_a_stack_is_a_fixed_point_of_fixed_points():
    model = stack_of("elman")
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randint(5, (2, 1), generator=generator).expand(2, STEPS * 3) for _ in range(2))
    weight = torch.zeros(2, STEPS * 3, dtype=torch.float64).index_fill(1, torch.tensor(STEPS * 3 - 1), 1)
    with torch.no_grad():
        for block in model.blocks:
            block.mixer.rnn.weight_hh_l0.mul_(0.3)
    assert_equal(
        gradients("rbp", model, x, y, weight, **SOLVERS[0][1]), gradients("bptt", model, x, y, weight)
    )


def test_the_penalty_is_of_column_sums_of_the_jacobian_above_the_bound():
    mixer, given = mixer_of("elman"), at_rest()
    with torch.no_grad():
        mixer.rnn.weight_hh_l0.copy_(0.25 * torch.eye(4) + 0.05)
    options = SOLVERS[0][1]
    plain = gradients("rbp", mixer, *given, **options)
    found = gradients("rbp", mixer, *given, contraction=0.7, bound=0.2, **options)
    W, U, b, c = mixer.rnn.parameters()
    h = mixer(given[0])[1].detach()
    penalty = 0
    for row, x in zip(h, given[0][:, 0], strict=True):
        D = 1 - torch.tanh(W @ x + b + U @ row + c) ** 2
        penalty = penalty + 0.7 * ((D[:, None] * U).sum(0) - 0.2).relu().norm()
    expected = torch.autograd.grad(penalty, [W, U, b, c])
    names = [name for name, _ in mixer.named_parameters()]
    assert_equal({n: found[n] - plain[n] for n in names}, dict(zip(names, expected, strict=True)))
