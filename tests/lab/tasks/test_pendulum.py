import math

import numpy as np
import pytest
import torch

from linrec.lab.tasks.dynamics import Pendulum

FEW = {"n_train": 2, "n_validation": 2}


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
    task = Pendulum(length=12, n_frames=12, dt=0.05, push=0, n_test=3, **FEW)
    for sine_cosine in task.split("test").targets.double():
        angle = math.atan2(*sine_cosine[0].tolist())
        expected = torch.tensor(fallen(angle, 0.05, 12), dtype=torch.float64)
        expected = torch.stack([expected.sin(), expected.cos()], dim=-1)
        torch.testing.assert_close(sine_cosine, expected, rtol=0, atol=2e-4)


def test_pushes_change_the_velocity_by_their_spread():
    # too short a time for anything else to move it
    task = Pendulum(length=3, n_frames=3, dt=1e-3, push=50.0, n_test=4000, **FEW)
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
    task = Pendulum(length=100, size=8, n_test=40, **FEW)
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
    task = Pendulum(length=100, size=16, n_test=300, **FEW)
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
    task = Pendulum(length=5, n_frames=9, size=2, n_test=3000, **FEW)
    intervals = task.split("test").inputs[..., -1]
    frames = intervals.cumsum(1) - 1
    dt = Pendulum(length=5, n_frames=9, size=2, n_test=3000, with_dt=True, **FEW).split("test")
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
