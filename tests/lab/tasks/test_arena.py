import math
import re

import numpy as np
import pytest
import torch

from linrec.lab.tasks import pathfinder_kernels
from linrec.lab.tasks.arena import SIZES, ListOps, Pathfinder, expression
from linrec.lab.train import LoopConfig, OptimConfig, TrainConfig, fit, load_run
from linrec.models import SequenceClassifierConfig
from tests.tiers import thorough, tiered


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The published lengths and depth, with fewer samples."""
    return ListOps(n_train=3000, n_validation=20, n_test=20, cache=tmp_path_factory.mktemp("cache"))


def evaluated(words):
    """Return value, depth and largest number of arguments of an expression, by a stack, from its words."""
    stack = [[]]
    depths, most = [], 0
    for word in words:
        if word == "]":
            operator, *arguments = stack.pop()
            most = max(most, len(arguments))
            assert len(arguments) >= 2
            ordered = sorted(arguments)
            middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
            made = {
                "[MIN": ordered[0],
                "[MAX": ordered[-1],
                "[MED": int(middle),
                "[SM": sum(arguments) % 10,
            }
            stack[-1].append(made[operator])
        elif word.startswith("["):
            stack.append([word])
        else:
            depths.append(len(stack))
            stack[-1].append(int(word))
    ((value,),) = stack
    return value, max(depths), most


def samples(task, split="train", n=None):
    data = task.split(split)
    batch = data.rows(torch.arange(len(data))[:n])
    for row, length, target in zip(batch.inputs, batch.lengths.tolist(), batch.targets.tolist(), strict=True):
        assert not row[length:].any()
        yield expression(row[:length].tolist()).split(), target


def test_the_target_is_the_value_of_the_expression(published):
    depths, arguments = set(), set()
    for words, target in samples(published, n=300):
        value, depth, most = evaluated(words)
        assert value == target
        assert 500 < len(words) < 2000
        depths.add(depth)
        arguments.add(most)
    assert max(depths) == 10 and max(arguments) == 10


@pytest.mark.parametrize(
    ("text", "value"),
    [("[MED 1 4 ]", 2), ("[MED 9 0 4 ]", 4), ("[SM 9 [MIN 8 3 ] ]", 2), ("[MAX 2 9 [MIN 4 7 ] 0 ]", 9)],
)
def test_the_oracle_itself(text, value):
    assert evaluated(text.split())[0] == value


def test_lengths_and_labels_are_distributed_as_in_the_original(published):
    train = published.labelled("train")
    # of 4,000 expressions that a plain recursion drew
    quantiles = train.lengths.double().quantile(torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64))
    assert ((quantiles - torch.tensor([543.0, 966.0, 1799.0])).abs() < torch.tensor([15, 60, 60])).all()
    shares = torch.bincount(train.labels, minlength=10) / 3000
    assert shares[0] == pytest.approx(0.166, abs=0.03) and shares[9] == pytest.approx(0.166, abs=0.03)
    assert shares[1:9].min() > 0.05 and shares[1:9].max() < 0.11
    assert published.chance == 0.1
    words = [word for words, _ in samples(published, n=300) for word in words]
    operators = [word for word in words if word.startswith("[")]
    for name in ("[MIN", "[MAX", "[MED", "[SM"):
        assert operators.count(name) / len(operators) == pytest.approx(0.25, abs=0.02)


def test_small_trees_have_the_probabilities_of_the_definition(tmp_path):
    # at depth 2 an expression is an operator of digits: 2 or 3 arguments, equally likely
    task = ListOps(
        length=5, min_length=4, depth=2, n_arguments=3, n_train=4000, n_validation=1, n_test=1, cache=tmp_path
    )
    lengths = task.labelled("train").lengths
    # all differ, and there are but 400 of the shorter ones
    assert lengths.unique().tolist() == [4, 5]
    assert (lengths == 4).sum() <= 400
    first_digit = task.labelled("train").tokens[lengths == 5][:, 1]
    counts = torch.bincount(first_digit, minlength=10).double()
    assert ((counts - len(first_digit) / 10).abs() < 4 * (len(first_digit) * 0.09) ** 0.5).all()


@thorough
def test_too_few_different_expressions_and_fields_out_of_range_are_refused(tmp_path):
    few = {"n_train": 3, "n_validation": 5, "n_test": 5, "cache": tmp_path}
    # there are ten digits
    message = "the split 'train' of ListOps has too few different samples: only 0 of 3 were found"
    with pytest.raises(ValueError, match=re.escape(message)):
        ListOps(length=1, min_length=1, **few).prepared()
    # one level is a digit
    with pytest.raises(
        ValueError, match="the split 'test' of ListOps has too few different samples: only 0 of 5 were found"
    ):
        ListOps(length=9, min_length=5, depth=1, **few).prepared()
    with pytest.raises(ValueError, match="`length` must be at least `min_length` = 501; got 400"):
        ListOps(length=400)
    for field, least in (("min_length", 1), ("depth", 1), ("n_arguments", 2)):
        with pytest.raises(ValueError, match=f"`{field}` must be at least {least}; got 0"):
            ListOps(**{field: 0})


def test_a_classifier_over_tokens_trains_and_its_scores_are_those_of_the_rebuilt_model(tmp_path):
    sizes = {"n_train": 40, "n_validation": 10, "n_test": 11, "cache": tmp_path / "cache"}
    task = ListOps(length=12, min_length=4, depth=3, n_arguments=3, **sizes)
    model = SequenceClassifierConfig(n_outputs=1, vocab_size=1, d_model=8, n_layers=1, mixer="hgru")
    loop = LoopConfig(steps=4, batch_size=4, accumulate=2, device="cpu")
    config = TrainConfig("tiny", task, model, OptimConfig(), loop)
    assert (config.model.vocab_size, config.model.n_outputs, config.model.n_features) == (15, 10, None)
    result = fit(config, tmp_path / "run")
    test = task.split("test")
    batch = test.rows(torch.arange(11))
    rebuilt = load_run(tmp_path / "run").classifier()
    with torch.no_grad():
        logits = torch.cat(
            [rebuilt(row[None, :n]) for row, n in zip(batch.inputs, batch.lengths.tolist(), strict=True)]
        )
    loss = torch.nn.functional.cross_entropy(logits.double(), batch.targets)
    assert result.test["loss"] == pytest.approx(float(loss), rel=1e-5)
    expected = float((logits.argmax(-1) == batch.targets).double().mean())
    assert result.test["accuracy"] == pytest.approx(expected)


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
