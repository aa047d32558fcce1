import math

import numpy as np
import pytest
import torch

from linrec.lab.tasks import pathfinder_kernels
from linrec.lab.tasks.arena import SIZES, Pathfinder
from tests.tiers import tiered

# one worker compiles what draws the images, and not each
pytestmark = pytest.mark.xdist_group("pathfinder")
FEW = {"n_train": 30, "n_validation": 10, "n_test": 10}
# fine pixels per pixel
FINE = {32: 8, 64: 4, 128: 3, 256: 2}
KINDS = [(32, 14), (32, 6), (64, 9), (128, 14), (256, 14)]


def drawn(size, contour_length, n, seed=0):
    task = Pathfinder(size=size, contour_length=contour_length, **FEW)
    return task, task.drawing(np.random.default_rng(seed), n)


def grow(free, fine, paddle, reach):
    """Set the fine pixels whose middles are no farther than `reach` from a paddle."""
    (x0, y0), (x1, y1) = paddle[:2], paddle[2:]
    left, top = (int((min(pair) - reach) * fine) for pair in ((x0, x1), (y0, y1)))
    right, bottom = (int((max(pair) + reach) * fine) + 1 for pair in ((x0, x1), (y0, y1)))
    x, y = np.meshgrid((np.arange(left, right) + 0.5) / fine, (np.arange(top, bottom) + 0.5) / fine)
    along = ((x - x0) * (x1 - x0) + (y - y0) * (y1 - y0)) / ((x1 - x0) ** 2 + (y1 - y0) ** 2)
    along = along.clip(0, 1)
    distance = np.hypot(x - x0 - along * (x1 - x0), y - y0 - along * (y1 - y0))
    free[top:bottom, left:right] |= distance <= reach


def filled(free, start):
    """Return what is reached from a place over neighbouring free places."""
    reached = np.zeros_like(free)
    reached[start] = free[start]
    front = [start]
    while front:
        i, j = front.pop()
        for place in ((i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)):
            if min(place) >= 0 and max(place) < len(free) and free[place] and not reached[place]:
                reached[place] = True
                front.append(place)
    return reached


@pytest.mark.parametrize(("size", "contour_length"), tiered([], KINDS))
def test_labels_say_whether_grown_paddles_connect_the_disks(size, contour_length):
    n = 12 if size <= 64 else 6
    _, drawing = drawn(size, contour_length, n)
    kind, fine = SIZES[size], FINE[size]
    assert set(drawing.labels) == {0, 1}
    for image, label, paddles, ends in zip(*drawing, strict=True):
        placed = paddles[~np.isnan(paddles[:, 0])]
        # the margin of this image: from one head to the turn, and on to the next tail
        steps = placed[1:contour_length, :2] - placed[: contour_length - 1, 2:]
        margin = min(kind.margins, key=lambda m: abs(2 * m - np.hypot(*steps.T).max()))
        # a quarter of the thickness more than what must touch, and less than what must not
        free = np.zeros((size * fine, size * fine), bool)
        for paddle in placed:
            grow(free, fine, paddle, margin + kind.thickness / 4)
        (tail_x, tail_y), (head_x, head_y) = placed[ends[0]][:2], placed[ends[1]][2:]
        tail, head = ((int(y * fine), int(x * fine)) for x, y in ((tail_x, tail_y), (head_x, head_y)))
        assert filled(free, tail)[head] == bool(label)
        # and there the disks are
        assert image[int(tail_y), int(tail_x)] == image[int(head_y), int(head_x)] == 255


@pytest.mark.parametrize(("size", "contour_length"), [(32, 14), (128, 9)])
def test_paths_are_laid_out_as_defined(size, contour_length):
    task, drawing = drawn(size, contour_length, 200)
    kind = SIZES[size]
    paths = drawing.paddles[:, : 2 * contour_length].reshape(-1, contour_length, 4)
    vectors = paths[:, :, 2:] - paths[:, :, :2]
    assert np.allclose(np.hypot(vectors[..., 0], vectors[..., 1]), kind.length)
    # the turn's point is as far from the head before it as from the tail after it
    units = vectors / kind.length
    offsets = paths[:, 1:, :2] - paths[:, :-1, 2:]
    sums = units[:, 1:] + units[:, :-1]
    margins = np.hypot(*offsets.transpose(2, 0, 1)) / np.hypot(*sums.transpose(2, 0, 1))
    assert np.allclose(margins, margins[:, :1])
    assert set(np.round(margins[:, 0], 6)) == set(kind.margins)
    assert np.allclose(offsets, margins[..., None] * sums)
    angles = np.arccos((units[:, 1:] * units[:, :-1]).sum(-1).clip(-1, 1))
    assert 0.8 * math.pi / 2 / kind.continuity < angles.max() < math.pi / 2 / kind.continuity
    # the second path begins near the first one, and that in the middle
    first, second = drawing.paddles[:, 0, :2], drawing.paddles[:, contour_length, :2]
    assert np.allclose(np.hypot(*(second - first).T), kind.seed_distance)
    assert first.min() >= 2 * kind.seed_distance and first.max() <= size - 2 * kind.seed_distance
    inside = kind.padding + min(kind.margins) + kind.thickness / 2
    assert np.nanmin(drawing.paddles) >= inside and np.nanmax(drawing.paddles) <= size - inside
    # each label and each pair of ends as often as another
    assert abs(drawing.labels.mean() - 0.5) < 4 * 0.5 / 200**0.5
    pairs = np.unique(drawing.ends, axis=0, return_counts=True)
    last = contour_length - 1
    expected = [[0, last], [0, 2 * last + 1], [last + 1, last], [last + 1, 2 * last + 1]]
    assert pairs[0].tolist() == expected and pairs[1].min() > 25
    assert (drawing.labels == (drawing.ends[:, 1] - drawing.ends[:, 0] == last)).all()
    # distractors are whole paths, and most of them find room
    count = (~np.isnan(drawing.paddles[:, 2 * contour_length :, 0])).sum(1)
    assert not (count % (contour_length // 3)).any()
    assert count.mean() > (0.4 if size == 32 else 0.95) * drawing.paddles[:, 2 * contour_length :].shape[1]
    assert task.chance == 0.5


# of the builders in the Arena's code: contrast is a path's times a paddle's, and numbers are whole paths
ARENA = {
    32: ((1,), 1, 2, 0.5, 1.5, 7, 1.0, 2 * 0.75, 20),
    64: ((1,), 1, 5, 1, 2.5, 12, 1.8, 0.8, 22),
    128: ((2, 3), 1, 5, 1.5, 3, 20, 1.8, 0.9, 35),
    256: ((3,), 22, 5, 2, 5, 27, 1.8, 1.0, 30),
}


@pytest.mark.parametrize("size", ARENA)
def test_numbers_are_those_of_the_arena(size):
    *numbers, n_distracting = ARENA[size]
    layouts = Pathfinder(size=size, **FEW).layouts()
    assert tuple(layout.margin for layout in layouts) == numbers[0]
    for layout in layouts:
        radius, distance = layout.marker_radius, layout.seed_distance
        of_paddles = layout.length, layout.thickness, radius, distance, layout.continuity, layout.contrast
        assert [layout.padding, *of_paddles] == numbers[1:] and layout.window == size
    for contour_length in (14, 9, 6):
        # the Arena divides whole numbers twice
        short = contour_length // 3
        paddles = drawn(size, contour_length, 1)[1].paddles
        assert paddles.shape[1] == 2 * contour_length + n_distracting // short * short


def test_turns_are_distributed_as_cosine_squared():
    random = np.random.default_rng(0)
    for continuity in (1.0, 1.8):
        turns = np.array([pathfinder_kernels.turn(random, continuity) for _ in range(20_000)]) * continuity
        # moments of the density cos(a)^2 / (pi / 2)
        variance, fourth = math.pi**2 / 12 - 1 / 2, math.pi**4 / 80 - math.pi**2 / 4 + 3 / 2
        assert abs(turns.mean()) < 4 * (variance / 20_000) ** 0.5
        assert abs((turns**2).mean() - variance) < 4 * ((fourth - variance**2) / 20_000) ** 0.5


@pytest.mark.parametrize("angle", [0.0, 0.4, 2.0, 4.5])
def test_pixels_are_the_share_of_them_that_is_covered(angle):
    layout = Pathfinder(size=64, **FEW).layouts()[0]
    image, paddle = np.zeros((32, 32)), np.empty((1, 4))
    pathfinder_kernels.put(paddle, 0, 15.3, 14.8, angle, layout.length)
    pathfinder_kernels.paint_paddle(image, paddle[0], layout)
    assert image.sum() == pytest.approx(layout.contrast * layout.length * layout.thickness, rel=0.06)
    rows, columns = np.indices(image.shape) + 0.5
    middle = 15.3 + layout.length / 2 * math.cos(angle), 14.8 + layout.length / 2 * math.sin(angle)
    centre = (image * columns).sum() / image.sum(), (image * rows).sum() / image.sum()
    assert centre == pytest.approx(middle, abs=0.1)
    disk = np.zeros((32, 32))
    pathfinder_kernels.paint_disk(disk, 15.3, 14.8, 3.0)
    assert disk.sum() == pytest.approx(9 * math.pi, rel=0.02) and disk.max() == 1.0
    # one at the border is cut off
    pathfinder_kernels.paint_disk(disk, 0.5, 31.5, 3.0)
    assert disk[31, 0] == 1.0


def test_pixels_are_real_numbers_or_tokens(tmp_path):
    index = torch.arange(10)
    real = Pathfinder(**FEW, cache=tmp_path)
    tokens = Pathfinder(**FEW, cache=tmp_path, tokens=True)
    assert (real.n_features, real.vocab_size) == (1, None)
    assert (tokens.n_features, tokens.vocab_size) == (None, 256)
    one, other = real.split("test").rows(index), tokens.split("test").rows(index)
    assert one.inputs.dtype == torch.float32 and other.inputs.dtype == torch.int64
    assert other.lengths is None
    torch.testing.assert_close(one.inputs[:, :, 0], other.inputs / 127.5 - 1)
    assert torch.equal(one.targets, other.targets)
    # both are the same samples, drawn once
    assert len(list(tmp_path.iterdir())) == 1


def test_sizes_and_lengths_that_are_not_published_are_refused():
    with pytest.raises(ValueError, match="`size` must be one of 32, 64, 128, 256; got 48"):
        Pathfinder(size=48)
    for length in (2, 15):
        with pytest.raises(ValueError, match=f"`contour_length` must be from 3 to 14, .*; got {length}"):
            Pathfinder(contour_length=length)
