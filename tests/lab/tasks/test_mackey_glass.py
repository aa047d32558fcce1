import math
from collections import deque

import numpy as np
import pytest
import torch

from linrec.lab.tasks.dynamics import MackeyGlass

FEW = {"n_train": 2, "n_validation": 2, "n_test": 3}


def series(past, tau, washout, steps):
    """One series by the definition, a number at a time; `past` holds what was before, oldest first."""
    memory, x, found = deque(past, maxlen=10 * tau), 1.2, []
    for substep in range(10 * (washout + steps)):
        delayed = memory[0]
        memory.append(x)
        x = x + 0.1 * (0.2 * delayed / (1 + delayed**10) - 0.1 * x)
        if substep % 10 == 9:
            found.append(math.tanh(x - 1))
    return found[washout:]


@pytest.mark.parametrize(("tau", "washout"), [(17, 0), (17, 100), (3, 5)])
def test_the_series_is_that_of_the_equation(tau, washout):
    task = MackeyGlass(length=40, horizon=5, tau=tau, washout=washout, **FEW)
    drawn = task.draw(np.random.default_rng(3), 2)
    past = 1.2 + 0.2 * (np.random.default_rng(3).random((10 * tau, 2)) - 0.5)
    for sample in range(2):
        expected = series(past[:, sample].tolist(), tau, washout, 45)
        np.testing.assert_allclose(drawn.inputs[sample, :, 0], expected[:40], rtol=0, atol=1e-6)
        np.testing.assert_allclose(drawn.targets[sample, :, 0], expected[5:], rtol=0, atol=1e-6)


def test_the_series_is_chaotic_from_17_on_and_goes_round_before():
    def apart(tau):
        # sequences of other pasts
        inputs = MackeyGlass(length=500, tau=tau, washout=1500, **FEW).split("test").inputs[:, :, 0]
        return float((inputs[0] - inputs[1]).abs().mean())

    assert apart(3) < 1e-3 < 0.05 < apart(17)


def test_the_spread_of_the_targets_is_chance():
    task = MackeyGlass(length=300, n_train=50, n_validation=1, n_test=50)
    variance = task.split("test").targets.var(correction=0)
    assert task.chance == pytest.approx(float(variance), rel=0.02)
    assert task.score(torch.zeros_like(task.split("test").targets), task.split("test"))["nrmse"] > 1


def test_fields_out_of_range_are_refused():
    for field in ("length", "horizon", "tau"):
        with pytest.raises(ValueError, match=f"`{field}` must be at least 1; got 0"):
            MackeyGlass(**{field: 0})
