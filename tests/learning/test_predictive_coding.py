"""Predictive coding against backpropagation and its equations written out, in float64."""

import pytest
import torch

from linrec.learning import build_learner
from tests.learning.test_learners import assert_equal, learnt, mixer_of, stack_of, stream, tokens

STEPS = 12


@pytest.mark.parametrize("mixer", ["elman", "gru", "lstm", "min_gru"])
@pytest.mark.parametrize(
    "options", [{"form": "zero_divergence"}, {"form": "fixed", "rate": 0.5, "sweeps": 150}]
)
def test_with_fixed_predictions_it_is_backpropagation_through_time(mixer, options):
    mixer, given = mixer_of(mixer), stream(steps=STEPS)
    expected = learnt(build_learner("bptt", mixer), *given, STEPS)
    assert_equal(learnt(build_learner("predictive_coding", mixer, **options), *given, STEPS), expected)


def test_a_stack_takes_a_sweep_more_per_layer():
    model, given = stack_of("gru", layers=3), tokens(steps=STEPS)
    expected = learnt(build_learner("bptt", model), *given, STEPS)
    learner = build_learner("predictive_coding", model, form="zero_divergence")
    assert_equal(learnt(learner, *given, STEPS), expected)


def test_errors_come_sweep_by_sweep():
    # with too few sweeps, the first steps have no error yet
    mixer, given = mixer_of("elman"), stream(steps=STEPS)
    expected = learnt(build_learner("bptt", mixer), *given, STEPS)
    learner = build_learner("predictive_coding", mixer, rate=1.0, sweeps=2)
    with pytest.raises(AssertionError):
        assert_equal(learnt(learner, *given, STEPS), expected, tolerance=1e-3)


def test_free_predictions_agree_as_the_losses_weight_falls():
    # not as the error falls: the rest of a parabola with curvature c is off by 1 / (1 + c) at every error
    mixer, (x, y, reset) = mixer_of("gru"), stream(steps=STEPS)
    differences = []
    for size in (0.1, 0.01):
        weight = torch.full((2, STEPS), size, dtype=torch.float64)
        exact, free = (
            build_learner(name, mixer, **options)
            for name, options in (
                ("bptt", {}),
                ("predictive_coding", {"form": "free", "rate": 0.3, "sweeps": 200}),
            )
        )
        for learner in (exact, free):
            learner.chunk(x, y, reset, weight)
        found = free.gradients()
        differences.append(
            sum((found[n] - g).norm() / g.norm() for n, g in exact.gradients().items()) / len(found)
        )
    assert differences[1] < 0.15 * differences[0] < 0.15


def test_temporal_predictive_coding_is_its_equations():
    mixer, (x, y, _) = mixer_of("elman"), stream(rows=1, steps=STEPS, resets=False)
    learner = build_learner("temporal_predictive_coding", mixer, rate=0.2, sweeps=7)
    W, U, b, c = (p.detach() for p in mixer.rnn.parameters())
    state, total = torch.zeros(4, dtype=torch.float64), torch.zeros(4, 4, dtype=torch.float64)
    for t in range(STEPS):
        guess = torch.tanh(W @ x[0, t] + b + U @ state + c)
        h = guess
        for _ in range(7):
            # the prediction is h, its loss |h - y|^2 / 4
            h = h + 0.2 * (-(h - guess) - (h - y[0, t]) / 2)
        total -= torch.outer((h - guess) * (1 - guess**2), state)
        state = h
        learner.step(x[:, t], y[:, t])
        assert_equal({0: learner.memory["state"][0]}, {0: state})
    assert_equal(learner.gradients(), {"rnn.weight_hh_l0": total})
