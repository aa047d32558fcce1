import math
from collections import deque

import numpy as np
import pytest
import torch

from linrec.lab.tasks.dynamics import Adding, FitzHughNagumo, IrregularSines, MackeyGlass, Pendulum
from tests.tiers import thorough

FEW = {"n_train": 20, "n_validation": 5}


@pytest.mark.parametrize("length", [2, 7, 10])
def test_the_two_marked_numbers_are_added(length):
    test = Adding(length=length, n_test=2000, **FEW).split("test")
    for steps, (target,) in zip(test.inputs.tolist(), test.targets.tolist(), strict=True):
        marked = [t for t, (_, mark) in enumerate(steps) if mark]
        assert all(mark in (0, 1) and 0 <= number < 1 for number, mark in steps)
        assert len(marked) == 2 and marked[0] < length // 2 <= marked[1]
        assert target == pytest.approx(sum(steps[t][0] for t in marked), abs=1e-6)
    # every step of a half is as likely as another
    marks = test.inputs[:, :, 1].sum(0)
    half = length // 2
    for places in (marks[:half], marks[half:]):
        n = len(places)
        assert (places - 2000 / n).abs().max() <= 4 * (2000 / n * (1 - 1 / n)) ** 0.5


def test_one_sixth_is_the_error_of_answering_one():
    test = Adding(length=4, n_test=20_000, **FEW).split("test")
    assert Adding().chance == 1 / 6
    # four standard deviations of the mean of squares, whose own variance is 7 / 180
    error = Adding(length=4).score(torch.ones_like(test.targets), test)["mse"]
    assert error == pytest.approx(1 / 6, abs=4 * (7 / 180 / 20_000) ** 0.5)


def test_a_sequence_of_one_step_is_refused():
    with pytest.raises(ValueError, match="`length` must be at least 2; got 1"):
        Adding(length=1)


FEW_SERIES = {"n_train": 2, "n_validation": 2, "n_test": 3}


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
    task = MackeyGlass(length=40, horizon=5, tau=tau, washout=washout, **FEW_SERIES)
    drawn = task.draw(np.random.default_rng(3), 2)
    past = 1.2 + 0.2 * (np.random.default_rng(3).random((10 * tau, 2)) - 0.5)
    for sample in range(2):
        expected = series(past[:, sample].tolist(), tau, washout, 45)
        np.testing.assert_allclose(drawn.inputs[sample, :, 0], expected[:40], rtol=0, atol=1e-6)
        np.testing.assert_allclose(drawn.targets[sample, :, 0], expected[5:], rtol=0, atol=1e-6)


def test_the_series_is_chaotic_from_17_on_and_goes_round_before():
    def apart(tau):
        # sequences of other pasts
        inputs = MackeyGlass(length=500, tau=tau, washout=1500, **FEW_SERIES).split("test").inputs[:, :, 0]
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


FEW_NEURONS = {"n_train": 2, "n_validation": 2, "n_test": 3}


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
    task = FitzHughNagumo(length=250, dt=dt, **FEW_NEURONS)
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
    task = FitzHughNagumo(length=20, **FEW_NEURONS)
    test = task.split("test")
    scores = task.score(test.targets + 0.5, test)
    assert scores["rmse"] == pytest.approx(0.5) and scores["mse"] == pytest.approx(0.25)
    assert task.score(test.targets, test)["rmse"] == 0
    targets = task.split("test").targets.double()
    off = float((targets - task.split("train").targets.double().mean()).square().mean())
    assert task.chance == task.trivial_score == pytest.approx(off)
    assert math.isfinite(scores["nrmse"]) and torch.isfinite(targets).all()


def test_fields_of_fitzhugh_nagumo_out_of_range_are_refused():
    with pytest.raises(ValueError, match="`length` must be at least 1; got 0"):
        FitzHughNagumo(length=0)
    for dt in (0.0, 1.5, math.nan):
        with pytest.raises(ValueError, match=f"`dt` must be greater than 0 and at most 1, .* got {dt}"):
            FitzHughNagumo(dt=dt)


FEW_SINES = {"n_train": 2, "n_validation": 2}
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
    test = IrregularSines(length=60, **WITHOUT_NOISE, **FEW_SINES).split("test")
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
    test = IrregularSines(length=20, shown=0.3, **WITHOUT_NOISE, **FEW_SINES).split("test")
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
    fields = {"length": 30, "n_test": 200, **FEW_SINES}
    noisy, clean = (IrregularSines(noise=noise, **fields).split("test") for noise in (0.1, 0.0))
    known = clean.inputs[:, :, 1] == 1
    difference = (noisy.inputs - clean.inputs)[:, :, 0][known]
    n = len(difference)
    assert float(difference.std()) == pytest.approx(0.1, abs=4 * 0.1 / (2 * n) ** 0.5)


def test_batches_have_the_gaps_in_units_of_the_mean_gap():
    task = IrregularSines(length=20, duration=2.0, with_dt=True, n_test=40, **FEW_SINES)
    batch = task.split("test").to("cpu").rows(torch.arange(5, 40))
    gaps = batch.inputs[:, :, 2]
    torch.testing.assert_close(batch.dt[:, 1:], gaps[:, 1:] * 19 / 2)
    assert (batch.dt[:, 0] == 1).all()
    assert IrregularSines(n_test=2, **FEW_SINES).split("test").rows(torch.arange(2)).dt is None


def test_fields_of_irregular_sines_out_of_range_are_refused():
    for shown in (0.0, 1.0):
        with pytest.raises(ValueError, match=f"`shown` must be between 0 and 1; got {shown}"):
            IrregularSines(shown=shown)
    with pytest.raises(ValueError, match="`length` must be at least 2; got 1"):
        IrregularSines(length=1)
    with pytest.raises(ValueError, match=r"`duration` must be positive; got 0\.0"):
        IrregularSines(duration=0.0)
    # at least one is shown, and one hidden
    for shown in (0.01, 0.99):
        number = (
            IrregularSines(length=4, shown=shown, n_test=1, **FEW_SINES).split("test").inputs[0, :, 1].sum()
        )
        assert number == (1 if shown < 0.5 else 3)


FEW_FILMS = {"n_train": 2, "n_validation": 2}


def fallen(angle, dt, frames, substeps=2000):
    """The angle at every frame, by very many small steps: that of a rod, as in the published generator."""
    inertia = 1 / 3
    velocity, found = 0.0, []
    for _ in range(frames):
        found.append(angle)
        for _ in range(substeps):
            velocity += dt / substeps * (9.81 / inertia * math.sin(angle) - 0.1 * velocity)
            angle += dt / substeps * velocity
    return found


def test_the_pendulum_moves_by_its_equation():
    # every frame is kept, and nothing pushes
    task = Pendulum(length=12, n_frames=12, dt=0.05, push=0, n_test=3, **FEW_FILMS)
    for sine_cosine in task.split("test").targets.double():
        angle = math.atan2(*sine_cosine[0].tolist())
        expected = torch.tensor(fallen(angle, 0.05, 12), dtype=torch.float64)
        expected = torch.stack([expected.sin(), expected.cos()], dim=-1)
        torch.testing.assert_close(sine_cosine, expected, rtol=0, atol=2e-4)


def test_pushes_change_the_velocity_by_their_spread():
    # too short a time for anything else to move it
    task = Pendulum(length=3, n_frames=3, dt=1e-3, push=50.0, n_test=4000, **FEW_FILMS)
    sine, cosine = task.split("test").targets.double().unbind(-1)
    angles = torch.atan2(sine, cosine)
    moved = torch.remainder(angles[:, 2] - angles[:, 1] + math.pi, 2 * math.pi) - math.pi
    assert float((angles[:, 1] - angles[:, 0]).abs().median()) < 1e-4
    assert float(moved.std()) == pytest.approx(0.05, rel=4 / 8000**0.5)


def brightness(size, angle):
    """A picture by its definition, pixel by pixel: rows from the top, the angle from there clockwise."""
    rows, length = [], 0.4 * size
    for row in range(size):
        for column in range(size):
            x, y = column - (size - 1) / 2, (size - 1) / 2 - row
            points = [length * k / 2000 for k in range(2001)]
            distance = min(math.hypot(x - p * math.sin(angle), y - p * math.cos(angle)) for p in points)
            rows.append(min(1, max(0, 1.5 - distance)))
    return rows


@pytest.mark.parametrize("angle", [0.0, 2.0, -1.1])
def test_a_picture_is_a_line_towards_the_angle(angle):
    picture = Pendulum(size=7).pictures(np.array([angle]))[0]
    np.testing.assert_allclose(picture, brightness(7, angle), rtol=0, atol=2e-3)


def test_pictures_are_of_the_targets_and_drown_in_noise_that_lasts():
    task = Pendulum(length=100, size=8, n_test=40, **FEW_FILMS)
    test = task.split("test")
    angles = torch.atan2(*test.targets.unbind(-1)).numpy()
    seen, clean = test.inputs[..., :-1], torch.from_numpy(task.pictures(angles))
    torch.testing.assert_close(seen[:, :5], clean[:, :5], rtol=0, atol=1e-5)
    assert seen.min() >= 0 and seen.max() <= 1
    # the share of each picture by least squares: noise has a mean of a half
    signal, given = clean - clean.mean(-1, keepdim=True), seen - seen.mean(-1, keepdim=True)
    share = (signal * given).sum(-1) / signal.square().sum(-1)
    assert (share[:, 5:] > 0.97).float().mean() > 0.1 and (share[:, 5:] < 0.3).float().mean() > 0.1
    later = share[:, 6:]
    correlation = torch.corrcoef(torch.stack([later[:, :-1].flatten(), later[:, 1:].flatten()]))[0, 1]
    assert correlation > 0.6


def fading(random, n):
    """How large the share of a picture is, frame by frame, as RKN's generator has it."""
    shares = []
    for _ in range(n):
        walk = [random.uniform(0, 1)]
        for _ in range(99):
            walk.append(min(1, max(0, walk[-1] + random.uniform(-0.2, 0.2))))
        low, high = random.uniform(0, 0.25), random.uniform(0.75, 1)
        shares.append([min(1, max(0, (share - low) / (high - low))) for share in walk])
    return np.array(shares)[:, 5:]


def test_pictures_fade_as_in_the_published_generator():
    task = Pendulum(length=100, size=16, n_test=300, **FEW_FILMS)
    test = task.split("test")
    angles = torch.atan2(*test.targets.unbind(-1)).numpy()
    black = torch.from_numpy(task.pictures(angles) == 0)
    # where the picture is black, noise from 0 to 1 is all there is: of some 200 pixels the brightest
    found = 1 - test.inputs[..., :-1].masked_fill(~black, 0).amax(-1).double().numpy()[:, 5:]
    expected = fading(np.random.default_rng(0), 2000)
    for measure, close in (
        (lambda shares: np.abs(np.diff(shares)).mean(), 0.003),
        (lambda shares: (shares > 0.98).mean(), 0.05),
        (lambda shares: (shares < 0.02).mean(), 0.05),
    ):
        assert measure(found) == pytest.approx(measure(expected), abs=close)


def test_the_last_feature_counts_the_frames_between_pictures():
    task = Pendulum(length=5, n_frames=9, size=2, n_test=3000, **FEW_FILMS)
    intervals = task.split("test").inputs[..., -1]
    frames = intervals.cumsum(1) - 1
    dt = Pendulum(length=5, n_frames=9, size=2, n_test=3000, with_dt=True, **FEW_FILMS).split("test")
    dt = dt.rows(torch.arange(3000)).dt
    assert dt[:, 1:].equal(intervals[:, 1:]) and (dt[:, 0] == 1).all()
    assert intervals.min() == 1 and intervals.equal(intervals.round()) and frames.max() == 8
    # every frame is as likely as another
    counts = torch.bincount(frames.flatten().long(), minlength=9)
    assert (counts - 15_000 / 9).abs().max() < 4 * (3000 * 5 / 9 * 4 / 9) ** 0.5


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match="`length` must be at most `n_frames` = 100; got 101"):
        Pendulum(length=101)
    with pytest.raises(ValueError, match="`dt` must be positive, in seconds; got 0"):
        Pendulum(dt=0)
    with pytest.raises(ValueError, match="`push` must be at least 0; got -1"):
        Pendulum(push=-1)
