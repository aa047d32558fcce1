"""Numba kernels that generate and render the paths of the task `pathfinder`.

A paddle is a dash of a path, given by a row (x0, y0, x1, y1) from its tail to its head, in pixels; y counts
rows. The pixel (i, j) covers j <= x <= j + 1 and i <= y <= i + 1.
"""

import math
from typing import NamedTuple, TypeAlias

import numba
import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]

# attempts at the direction of the next paddle, before its path is rejected
TURNS = 10
# attempts at the second path, before both paths are drawn again
SECOND_PATHS = 1000
# attempts at a distractor, before it is left out
PLACES = 100
# rows and columns of sampling points per pixel, for the coverage of a pixel
POINTS = 4


class Layout(NamedTuple):
    """Geometry of an image; lengths are in pixels.

    Args:
        window: rows and columns of the image.
        padding: width of the empty border.
        length: length of a paddle.
        thickness: thickness of a paddle.
        margin: distance from the end of a paddle to the point where its path turns.
        continuity: straightness of paths; the sharpest turn is pi / (2 continuity).
        seed_distance: distance between the tails of the two paths.
        marker_radius: radius of the disks at the ends.
        contrast: factor of a paddle's pixel coverage.
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
    """Return the squared distance of two paddles, as line segments: 0 if they cross."""
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
    """Return whether a paddle, grown by the margin, is inside the image and touches only its predecessor."""
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
    """Write a paddle, given by its tail, its direction and its length."""
    paddles[place, 0], paddles[place, 1] = x, y
    paddles[place, 2], paddles[place, 3] = x + length * math.cos(angle), y + length * math.sin(angle)


@numba.njit(cache=True)
def turn(random: np.random.Generator, continuity: float) -> float:
    """Draw the angle between two paddles, with density proportional to cos(min(c |angle|, pi / 2))^2."""
    while True:
        angle = (2 * random.random() - 1) * min(math.pi, math.pi / 2 / continuity)
        if random.random() < math.cos(continuity * angle) ** 2:
            return angle


@numba.njit(cache=True)
def add_path(
    random: np.random.Generator, paddles: Floats, begin: int, end: int, x: float, y: float, layout: Layout
) -> bool:
    """Try to write paddles `begin` to `end` - 1 as a path from (x, y); return whether the path fits."""
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
    """Write two paths of n paddles whose tails are `seed_distance` apart, the first away from the border."""
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
    """Write at most `number` distractors of n paddles where they fit; return the new number of paddles."""
    for _ in range(number):
        for _ in range(PLACES):
            x, y = layout.window * random.random(), layout.window * random.random()
            if add_path(random, paddles, count, count + n, x, y, layout):
                count += n
                break
    return count


@numba.njit(cache=True)
def paint_paddle(image: Floats, paddle: Floats, layout: Layout) -> None:
    """Draw a paddle: set pixels to the maximum of their value and min(1, contrast * coverage)."""
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
    """Draw a disk: set pixels to the maximum of their value and their coverage by the disk."""
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
        random: the random generator.
        layouts: possible layouts; each image has a random layout.
        contour_length: number of paddles in each of the two paths.
        n_distractors: maximum number of distractors, which are shorter paths.
        distractor_length: number of paddles in a distractor.
        images: output, shape (n, window, window).
        labels: output, shape (n); 1 if the disks mark the ends of the same path.
        paddles: output, shape (n, 2 contour_length + n_distractors distractor_length, 4): the two paths, then
            the distractors; NaN for unused rows.
        ends: output, indices of the paddles with a disk at the tail and at the head, shape (n, 2).
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
