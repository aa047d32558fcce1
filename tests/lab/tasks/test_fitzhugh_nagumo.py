import math

import numpy as np
import pytest
import torch

from linrec.lab.tasks.dynamics import FitzHughNagumo
from tests.tiers import thorough

FEW = {"n_train": 2, "n_validation": 2, "n_test": 3}


def by_taylor(v, w, dt, steps, substeps=200):
    """v at every step, a number at a time: by the Taylor series of second order, and very small steps."""
    h, found = dt / substeps, [v]
    for _ in range(steps):
        for _ in range(substeps):
            dv, dw = v - v**3 / 3 - w + 0.5, (v + 0.7 - 0.8 * w) / 50
            ddv, ddw = (1 - v**2) * dv - dw, (dv - 0.8 * dw) / 50
            v, w = v + h * dv + h**2 / 2 * ddv, w + h * dw + h**2 / 2 * ddw
        found.append(v)
    return found


@pytest.mark.parametrize("dt", [0.4, 1.0])
def test_the_series_is_that_of_the_equations(dt):
    # long enough for a spike and the recovery from it
    task = FitzHughNagumo(length=250, dt=dt, **FEW)
    drawn = task.draw(np.random.default_rng(3), 2)
    for sample, v in enumerate(np.random.default_rng(3).uniform(-1, 1, 2)):
        expected = by_taylor(v, 0.0, dt, 250)
        assert max(expected) > 1.7 and min(expected) < -1.5
        np.testing.assert_allclose(drawn.inputs[sample, :, 0], expected[:-1], rtol=0, atol=1e-4)
        np.testing.assert_allclose(drawn.targets[sample, :, 0], expected[1:], rtol=0, atol=1e-4)


@thorough
def test_smaller_steps_of_integration_change_nothing(monkeypatch):
    start = np.stack([np.linspace(-1, 1, 9), np.zeros(9)])
    task = FitzHughNagumo()
    found = task.solution(start)
    monkeypatch.setattr("linrec.lab.tasks.dynamics.SUBSTEPS", 16)
    finer = task.solution(start)
    assert found.shape == (9, 1001) and np.abs(found - finer).max() < 1e-5
    # a method of order four, whose error falls by 2^4
    monkeypatch.setattr("linrec.lab.tasks.dynamics.SUBSTEPS", 4)
    assert np.abs(task.solution(start) - finer).max() == pytest.approx(
        16 * np.abs(found - finer).max(), rel=0.2
    )


def test_sequences_begin_anywhere_between_minus_one_and_one():
    first = FitzHughNagumo(length=1, n_train=4000, n_validation=1, n_test=1).split("train").inputs[:, 0, 0]
    assert first.abs().max() <= 1
    # four standard deviations of the mean of uniform numbers, and of their squares
    assert float(first.mean()) == pytest.approx(0, abs=4 * (1 / 3 / 4000) ** 0.5)
    assert float(first.square().mean()) == pytest.approx(1 / 3, abs=4 * (4 / 45 / 4000) ** 0.5)


def test_the_score_has_the_root_of_the_squared_error():
    task = FitzHughNagumo(length=20, **FEW)
    test = task.split("test")
    scores = task.score(test.targets + 0.5, test)
    assert scores["rmse"] == pytest.approx(0.5) and scores["mse"] == pytest.approx(0.25)
    assert task.score(test.targets, test)["rmse"] == 0
    targets = task.split("test").targets.double()
    off = float((targets - task.split("train").targets.double().mean()).square().mean())
    assert task.chance == task.trivial_score == pytest.approx(off)
    assert math.isfinite(scores["nrmse"]) and torch.isfinite(targets).all()


def test_fields_out_of_range_are_refused():
    with pytest.raises(ValueError, match="`length` must be at least 1; got 0"):
        FitzHughNagumo(length=0)
    for dt in (0.0, 1.5, math.nan):
        with pytest.raises(ValueError, match=f"`dt` must be greater than 0 and at most 1, .* got {dt}"):
            FitzHughNagumo(dt=dt)
