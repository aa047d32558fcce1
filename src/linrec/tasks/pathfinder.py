"""Pathfinder and Path-X: whether two disks mark the ends of one dashed path, in an image read pixel by pixel.

Source: Linsley, Kim, Veerabadran, Windolf and Serre (2018), arXiv:1805.08315, in the sizes of the Long
Range Arena (Tay et al., 2020), arXiv:2011.04006, sections 2.2.5 and 2.2.6, with the numbers of its code.
Their images come from a generator without a seed; here they are drawn anew, and all depends on the seed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from linrec.tasks.base import SplitName
from linrec.tasks.images import SequentialSplit
from linrec.tasks.labelled import LabelledTask, LabelledTokens

if TYPE_CHECKING:
    from linrec.tasks.pathfinder_kernels import Layout

__all__ = ["Pathfinder"]


class Size(NamedTuple):
    """The Long Range Arena's numbers for images of one size, in pixels.

    Args:
        padding: empty rows and columns at each side.
        margins: from a paddle's end to the point where its path turns; of several, each image has one.
        length: of a paddle.
        thickness: of a paddle.
        marker_radius: of the disks.
        seed_distance: from the tail of one path to that of the other.
        continuity: an angle of pi / (2 continuity) is the sharpest turn.
        n_distracting: paddles of all distractors together.
        contrast: what a paddle's coverage is multiplied by.
    """

    padding: int
    margins: tuple[int, ...]
    length: int
    thickness: float
    marker_radius: float
    seed_distance: int
    continuity: float
    n_distracting: int
    contrast: float


SIZES: Mapping[int, Size] = {
    32: Size(1, (1,), 2, 0.5, 1.5, 7, 1.0, 20, 1.5),
    64: Size(1, (1,), 5, 1.0, 2.5, 12, 1.8, 22, 0.8),
    128: Size(1, (2, 3), 5, 1.5, 3.0, 20, 1.8, 35, 0.9),
    256: Size(22, (3,), 5, 2.0, 5.0, 27, 1.8, 30, 1.0),
}


LONGEST = 14
"""Paddles of a path at most: the published ones, and there is little room for more in the smaller images."""


class Drawing(NamedTuple):
    """Images, and what they were drawn from.

    Args:
        images: shape (n, size, size), uint8.
        labels: 1 where the disks mark the ends of one path, shape (n), int64.
        paddles: tail and head (x0, y0, x1, y1) of each in pixels, shape (n, p, 4), float64; first those
            of one path, of the other, then of distractors; NaN where there is none.
        ends: number of the paddle at whose tail one disk is, and of that at whose head the other is, shape
            (n, 2), int64.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    paddles: NDArray[np.float64]
    ends: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Pathfinder(LabelledTask):
    """Whether two disks mark the ends of one path of dashes, 1, or of two, 0.

    Every image has two paths of `contour_length` paddles that begin near each other, shorter ones that
    distract, and two disks: at the tail of one of the two paths, and at the head of the same one or of the
    other. A path turns between its paddles, at a point that is a margin m away from both, by an angle a whose
    density is in proportion to cos(min(c |a|, pi / 2))^2. Grown by m, paddles touch those next to them in
    their path and no others: the label is whether the disks' paddles are connected then.

    An image is a sequence of size^2 pixels, row after row, each a real number in [-1, 1] or a token.

    Args:
        size: rows and columns: 32, 64, 128, which is Path-X, or 256.
        contour_length: paddles of each of the two paths: 14 is hard, 9 intermediate, 6 easy.
        tokens: whether pixels are tokens 0 to 255 rather than real numbers.
        n_train: samples of the training split.
        n_validation: samples of the validation split.
        n_test: samples of the test split.
        seed: seed of the data alone.
        cache: where samples are kept; None is `linrec/tasks` in the user's folder for caches.

    Raises:
        ValueError: a field is out of range.

    Source: Long Range Arena (Tay et al., 2020), sections 2.2.5 and 2.2.6: paths of 14 paddles, and of 200,000
    images 80% for training and 10% each for validation and testing.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> sizes = {"n_train": 8, "n_validation": 2, "n_test": 2, "cache": Path(tempfile.mkdtemp())}
        >>> task = Pathfinder(contour_length=6, **sizes)
        >>> batch = task.split("train").rows(torch.arange(4))
        >>> batch.inputs.shape, batch.inputs.max().item(), task.n_outputs
        (torch.Size([4, 1024, 1]), 1.0, 2)
    """

    size: int = 32
    contour_length: int = 14
    tokens: bool = False
    n_train: int = 160_000
    n_validation: int = 20_000
    n_test: int = 20_000
    not_drawn_from: ClassVar[tuple[str, ...]] = ("cache", "tokens")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size not in SIZES:
            raise ValueError(f"`size` must be one of {', '.join(map(str, SIZES))}; got {self.size}.")
        if not 3 <= self.contour_length <= LONGEST:
            raise ValueError(
                f"`contour_length` must be from 3 to {LONGEST}, so that there is room; got "
                f"{self.contour_length}."
            )

    @property
    def vocab_size(self) -> int | None:
        """Number of input tokens: 256, or None where pixels are real numbers."""
        return 256 if self.tokens else None

    @property
    def n_features(self) -> int | None:
        """Real numbers per step: 1, or None where pixels are tokens."""
        return None if self.tokens else 1

    @property
    def n_outputs(self) -> int:
        """Number of target classes: two paths or one."""
        return 2

    def split(self, name: SplitName) -> LabelledTokens | SequentialSplit:
        """Return the images of one split.

        Args:
            name: "train", "validation" or "test".

        Raises:
            ValueError: there is no such split.
        """
        found = self.labelled(name)
        if self.tokens:
            return found
        # from 0 .. 255 to -1 .. 1
        half = torch.tensor([0.5])
        return SequentialSplit(found.tokens[:, :, None], found.labels, mean=half, std=half)

    def draw(self, random: np.random.Generator, n: int) -> LabelledTokens:
        """Draw n images as sequences, with their labels."""
        drawing = self.drawing(random, n)
        tokens = torch.from_numpy(drawing.images).flatten(1)
        return LabelledTokens(tokens, torch.from_numpy(drawing.labels))

    def drawing(self, random: np.random.Generator, n: int) -> Drawing:
        """Draw n images, and return what they were drawn from too."""
        # compiled when it is needed, not when the task is looked at
        from linrec.tasks import pathfinder_kernels

        distractor_length = self.contour_length // 3
        n_distractors = SIZES[self.size].n_distracting // distractor_length
        n_paddles = 2 * self.contour_length + n_distractors * distractor_length
        drawing = Drawing(
            np.empty((n, self.size, self.size), np.uint8),
            np.empty(n, np.int64),
            np.empty((n, n_paddles, 4)),
            np.empty((n, 2), np.int64),
        )
        pathfinder_kernels.draw(
            random, self.layouts(), self.contour_length, n_distractors, distractor_length, *drawing
        )
        return drawing

    def layouts(self) -> tuple["Layout", ...]:
        """Return the numbers that images are drawn with, of which each has one."""
        from linrec.tasks.pathfinder_kernels import Layout

        size = SIZES[self.size]
        return tuple(
            Layout(
                window=float(self.size),
                padding=float(size.padding),
                length=float(size.length),
                thickness=size.thickness,
                margin=float(margin),
                continuity=size.continuity,
                seed_distance=float(size.seed_distance),
                marker_radius=size.marker_radius,
                contrast=size.contrast,
            )
            for margin in size.margins
        )
