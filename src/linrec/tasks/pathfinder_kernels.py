"""Paddles along two paths, and their pixels, compiled by Numba: what the task `pathfinder` is drawn with.

A paddle is a row (x0, y0, x1, y1) from its tail to its head, in pixels; y counts rows. The pixel (i, j) is
the square from j to j + 1 and from i to i + 1.
"""

import math
from typing import NamedTuple, TypeAlias

import numba
import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]

# of the direction of a next paddle
TURNS = 10
# of the second path, until both are drawn anew
SECOND_PATHS = 1000
# of a place for a distractor, until it is left out
PLACES = 100
# rows and columns of points at which it is counted how much of a pixel is covered
POINTS = 4


class Layout(NamedTuple):
    """Lengths in pixels, and how straight a path is.

    Args:
        window: rows and columns.
        padding: of these, how many are empty at each side.
        length: of a paddle.
        thickness: of a paddle.
        margin: from a paddle's end to the point where its path turns.
        continuity: an angle of pi / (2 continuity) is the sharpest turn.
        seed_distance: from the tail of one path to that of the other.
        marker_radius: of the disks at the ends.
        contrast: what a paddle's coverage is multiplied by.
    """

    window: float
    padding: float
    length: float
    thickness: float
    margin: float
    continuity: float
    seed_distance: float
    marker_radius: float
    contrast: float


@numba.njit(cache=True)
def squared_distance(paddles: Floats, one: int, other: int) -> float:
    """Return the squared distance of two paddles as segments: 0 where they cross, else that of an end."""
    ax, ay, bx, by = paddles[one]
    cx, cy, dx, dy = paddles[other]
    of_c = (bx - ax) * (cy - ay) - (by - ay) * (cx - ax)
    of_d = (bx - ax) * (dy - ay) - (by - ay) * (dx - ax)
    of_a = (dx - cx) * (ay - cy) - (dy - cy) * (ax - cx)
    of_b = (dx - cx) * (by - cy) - (dy - cy) * (bx - cx)
    if of_a * of_b < 0 and of_c * of_d < 0:
        return 0.0
    least = np.inf
    for end in range(4):
        segment, place = (one, other) if end < 2 else (other, one)
        px, py = paddles[place, 2 * (end % 2)], paddles[place, 2 * (end % 2) + 1]
        x0, y0, x1, y1 = paddles[segment]
        along = ((px - x0) * (x1 - x0) + (py - y0) * (y1 - y0)) / ((x1 - x0) ** 2 + (y1 - y0) ** 2)
        along = min(1.0, max(0.0, along))
        least = min(least, (px - x0 - along * (x1 - x0)) ** 2 + (py - y0 - along * (y1 - y0)) ** 2)
    return least


@numba.njit(cache=True)
def fits(paddles: Floats, place: int, before: int, layout: Layout) -> bool:
    """Whether a paddle grown by the margin is inside, and apart from all such but its predecessor's."""
    grown = layout.margin + layout.thickness / 2
    border = layout.padding + grown
    for coordinate in paddles[place]:
        if not border <= coordinate <= layout.window - border:
            return False
    for other in range(place):
        if other != before and squared_distance(paddles, other, place) < (2 * grown) ** 2:
            return False
    return True


@numba.njit(cache=True)
def put(paddles: Floats, place: int, x: float, y: float, angle: float, length: float) -> None:
    """Write a paddle by its tail and its direction."""
    paddles[place, 0], paddles[place, 1] = x, y
    paddles[place, 2], paddles[place, 3] = x + length * math.cos(angle), y + length * math.sin(angle)


@numba.njit(cache=True)
def turn(random: np.random.Generator, continuity: float) -> float:
    """Draw the angle between two paddles: its density is in proportion to cos(min(c |angle|, pi / 2))^2."""
    while True:
        angle = (2 * random.random() - 1) * min(math.pi, math.pi / 2 / continuity)
        if random.random() < math.cos(continuity * angle) ** 2:
            return angle


@numba.njit(cache=True)
def add_path(
    random: np.random.Generator, paddles: Floats, begin: int, end: int, x: float, y: float, layout: Layout
) -> bool:
    """Try to write the paddles from `begin` to `end` - 1 as a path from (x, y) in a random direction."""
    angle = 2 * math.pi * random.random()
    put(paddles, begin, x, y, angle, layout.length)
    if not fits(paddles, begin, -1, layout):
        return False
    for place in range(begin + 1, end):
        # the point where the path turns
        x = paddles[place - 1, 2] + layout.margin * math.cos(angle)
        y = paddles[place - 1, 3] + layout.margin * math.sin(angle)
        before, found = angle, False
        for _ in range(TURNS):
            angle = before + turn(random, layout.continuity)
            tail_x, tail_y = x + layout.margin * math.cos(angle), y + layout.margin * math.sin(angle)
            put(paddles, place, tail_x, tail_y, angle, layout.length)
            found = fits(paddles, place, place - 1, layout)
            if found:
                break
        if not found:
            return False
    return True


@numba.njit(cache=True)
def add_two_paths(random: np.random.Generator, paddles: Floats, n: int, layout: Layout) -> None:
    """Write two paths of n paddles; the first one begins near the middle, the second one near that."""
    border = 2 * layout.seed_distance
    while True:
        x = border + (layout.window - 2 * border) * random.random()
        y = border + (layout.window - 2 * border) * random.random()
        if not add_path(random, paddles, 0, n, x, y, layout):
            continue
        for _ in range(SECOND_PATHS):
            around = 2 * math.pi * random.random()
            x_near = x + layout.seed_distance * math.cos(around)
            y_near = y + layout.seed_distance * math.sin(around)
            if add_path(random, paddles, n, 2 * n, x_near, y_near, layout):
                return


@numba.njit(cache=True)
def add_distractors(
    random: np.random.Generator, paddles: Floats, count: int, number: int, n: int, layout: Layout
) -> int:
    """Write up to `number` paths of n paddles where there is room; return how many paddles there are then."""
    for _ in range(number):
        for _ in range(PLACES):
            x, y = layout.window * random.random(), layout.window * random.random()
            if add_path(random, paddles, count, count + n, x, y, layout):
                count += n
                break
    return count


@numba.njit(cache=True)
def paint_paddle(image: Floats, paddle: Floats, layout: Layout) -> None:
    """Set pixels to min(1, contrast * covered share) where that is more than they have."""
    x0, y0, x1, y1 = paddle
    ux, uy = (x1 - x0) / layout.length, (y1 - y0) / layout.length
    reach = layout.thickness / 2
    for i in range(int(min(y0, y1) - reach), int(max(y0, y1) + reach) + 1):
        for j in range(int(min(x0, x1) - reach), int(max(x0, x1) + reach) + 1):
            inside = 0
            for point in range(POINTS**2):
                x = j + (point % POINTS + 0.5) / POINTS - x0
                y = i + (point // POINTS + 0.5) / POINTS - y0
                inside += 0 <= x * ux + y * uy <= layout.length and abs(x * uy - y * ux) <= reach
            image[i, j] = max(image[i, j], min(1.0, layout.contrast * inside / POINTS**2))


@numba.njit(cache=True)
def paint_disk(image: Floats, x: float, y: float, radius: float) -> None:
    """Set pixels to the share of them that a disk covers, where that is more than they have."""
    last = len(image) - 1
    for i in range(max(0, int(y - radius)), min(last, int(y + radius)) + 1):
        for j in range(max(0, int(x - radius)), min(last, int(x + radius)) + 1):
            inside = 0
            for point in range(POINTS**2):
                dx = j + (point % POINTS + 0.5) / POINTS - x
                dy = i + (point // POINTS + 0.5) / POINTS - y
                inside += dx * dx + dy * dy <= radius * radius
            image[i, j] = max(image[i, j], inside / POINTS**2)


@numba.njit(cache=True)
def draw(
    random: np.random.Generator,
    layouts: tuple[Layout, ...],
    contour_length: int,
    n_distractors: int,
    distractor_length: int,
    images: NDArray[np.uint8],
    labels: NDArray[np.int64],
    paddles: Floats,
    ends: NDArray[np.int64],
) -> None:
    """Draw images and their labels.

    Args:
        random: the generator.
        layouts: one of them is chosen for each image.
        contour_length: paddles of each of the two paths.
        n_distractors: shorter paths, where there is room.
        distractor_length: paddles of each.
        images: to write, shape (n, window, window).
        labels: to write, shape (n); 1 where the disks mark the ends of one path.
        paddles: to write, those of each image, shape (n, 2 contour_length + n_distractors distractor_length,
            4); the two paths come first. NaN where there is none.
        ends: to write, the paddles at whose tail and at whose head the disks are, shape (n, 2).
    """
    for place in range(len(images)):
        layout = layouts[int(len(layouts) * random.random())]
        labels[place], path = int(2 * random.random()), int(2 * random.random())
        add_two_paths(random, paddles[place], contour_length, layout)
        count = add_distractors(
            random, paddles[place], 2 * contour_length, n_distractors, distractor_length, layout
        )
        paddles[place, count:] = np.nan
        image = np.zeros(images.shape[1:])
        for paddle in paddles[place, :count]:
            paint_paddle(image, paddle, layout)
        other = path if labels[place] == 1 else 1 - path
        ends[place, 0], ends[place, 1] = path * contour_length, (other + 1) * contour_length - 1
        tail, head = paddles[place, ends[place, 0]], paddles[place, ends[place, 1]]
        paint_disk(image, tail[0], tail[1], layout.marker_radius)
        paint_disk(image, head[2], head[3], layout.marker_radius)
        images[place] = np.round(255 * image).astype(np.uint8)
