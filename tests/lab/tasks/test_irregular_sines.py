import math

import numpy as np
import pytest
import torch

from linrec.lab.tasks.dynamics import IrregularSines

FEW = {"n_train": 2, "n_validation": 2}
# of which the shown and the hidden values have the same law
WITHOUT_NOISE = {"noise": 0.0, "n_test": 40}


def fitted(times, values):
    """The worst error of c + sin(phase) with the best f_0, f_1 and c, found by steps of Gauss and Newton."""
    best = math.inf
    for start in np.stack(np.meshgrid(np.linspace(0.4, 0.8, 5), np.linspace(0.4, 0.8, 5)), -1).reshape(-1, 2):
        guess = np.array([*start, 1.0])
        for _ in range(30):
            # the integral of a frequency that changes linearly over a time of 5
            of_first, of_last = times - times**2 / 10, times**2 / 10
            phase = 2 * math.pi * (guess[0] * of_first + guess[1] * of_last)
            slope = 2 * math.pi * np.cos(phase)
            jacobian = np.stack([slope * of_first, slope * of_last, np.ones_like(times)], -1)
            off = guess[2] + np.sin(phase) - values
            guess = guess - np.linalg.lstsq(jacobian, off, rcond=None)[0]
        if np.abs(off).max() < best:
            best, found = np.abs(off).max(), guess
    return best, found


def test_shown_and_hidden_values_are_of_one_sine_whose_frequency_changes():
    test = IrregularSines(length=60, **WITHOUT_NOISE, **FEW).split("test")
    found = []
    for inputs, targets in zip(test.inputs[:8].double(), test.targets[:8, :, 0].double(), strict=True):
        times = inputs[:, 2].cumsum(0).numpy()
        values = torch.where(inputs[:, 1] == 1, inputs[:, 0], targets).numpy()
        error, parameters = fitted(times, values)
        assert error < 1e-4
        found.append(parameters)
    frequencies, offsets = np.array(found)[:, :2], np.array(found)[:, 2]
    assert frequencies.min() >= 0.4 and frequencies.max() <= 0.8
    assert np.abs(offsets - 1).max() < 0.5 and offsets.std() > 0.02


def test_a_step_has_its_value_or_asks_for_it_and_the_time_since_the_step_before():
    test = IrregularSines(length=20, shown=0.3, **WITHOUT_NOISE, **FEW).split("test")
    values, shown, gaps = test.inputs.unbind(-1)
    assert (shown.sum(1) == 6).all() and (shown[:, 0] == 1).all()
    assert torch.equal(test.targets.isnan()[:, :, 0], shown == 1)
    assert not values[shown == 0].any() and (gaps >= 0).all() and not gaps[:, 0].any()
    assert gaps.sum(1).max() <= 5 and len(torch.unique(gaps.sum(1))) == 40
    # all points but the first are shown as often as each other
    share = IrregularSines(length=5, shown=0.6, n_train=4000, n_validation=1, n_test=1).split("train")
    counts = share.inputs[:, 1:, 1].mean(0)
    assert (counts - 0.5).abs().max() < 4 * 0.5 / 4000**0.5


def test_times_are_uniform_and_their_length_is_a_field():
    train = IrregularSines(length=50, duration=2.0, n_train=400, n_validation=1, n_test=1).split("train")
    times = train.inputs[:, :, 2].cumsum(1)[:, 1:]
    n = times.numel()
    # four standard deviations of the mean of uniform numbers on [0, 2], and of their squares
    assert times.max() <= 2 and float(times.mean()) == pytest.approx(1, abs=4 * (1 / 3 / n) ** 0.5)
    assert float(times.square().mean()) == pytest.approx(4 / 3, abs=4 * (64 / 45 / n) ** 0.5)


def test_noise_has_its_spread():
    fields = {"length": 30, "n_test": 200, **FEW}
    noisy, clean = (IrregularSines(noise=noise, **fields).split("test") for noise in (0.1, 0.0))
    known = clean.inputs[:, :, 1] == 1
    difference = (noisy.inputs - clean.inputs)[:, :, 0][known]
    n = len(difference)
    assert float(difference.std()) == pytest.approx(0.1, abs=4 * 0.1 / (2 * n) ** 0.5)


def test_batches_have_the_gaps_in_units_of_the_mean_gap():
    task = IrregularSines(length=20, duration=2.0, with_dt=True, n_test=40, **FEW)
    batch = task.split("test").to("cpu").rows(torch.arange(5, 40))
    gaps = batch.inputs[:, :, 2]
    torch.testing.assert_close(batch.dt[:, 1:], gaps[:, 1:] * 19 / 2)
    assert (batch.dt[:, 0] == 1).all()
    assert IrregularSines(n_test=2, **FEW).split("test").rows(torch.arange(2)).dt is None


def test_fields_out_of_range_are_refused():
    for shown in (0.0, 1.0):
        with pytest.raises(ValueError, match=f"`shown` must be between 0 and 1; got {shown}"):
            IrregularSines(shown=shown)
    with pytest.raises(ValueError, match="`length` must be at least 2; got 1"):
        IrregularSines(length=1)
    with pytest.raises(ValueError, match=r"`duration` must be positive; got 0\.0"):
        IrregularSines(duration=0.0)
    # at least one is shown, and one hidden
    for shown in (0.01, 0.99):
        number = IrregularSines(length=4, shown=shown, n_test=1, **FEW).split("test").inputs[0, :, 1].sum()
        assert number == (1 if shown < 0.5 else 3)
