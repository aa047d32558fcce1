"""Drawn tasks of the Long Range Arena: ListOps, Pathfinder and Path-X.

The Arena's generators have no seed, so its files cannot be reproduced; these tasks draw new samples from a
seed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from linrec.lab.tasks.base import SplitName
from linrec.lab.tasks.images import SequentialSplit
from linrec.lab.tasks.labelled import LabelledTask, LabelledTokens

if TYPE_CHECKING:
    from linrec.lab.tasks.pathfinder_kernels import Layout

__all__ = ["ListOps", "Pathfinder", "expression"]

SYMBOLS = (*"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]")
"""The symbol of each token."""


@dataclass(frozen=True, kw_only=True)
class ListOps(LabelledTask):
    """Evaluate an expression in prefix notation, whose value is a digit.

        [MAX 2 9 [MIN 4 7 ] 0 ]   ->   9

    A node is an operator with probability 1/4 and a digit otherwise; nodes at the maximum depth are digits.
    Operators are MIN, MAX, MED (the median, rounded down) and SM (the sum modulo 10). The number of arguments
    is uniform from 2 to `n_arguments`. Expressions outside of the range of lengths are rejected, and so are
    repeated expressions. Tokens are the digits 0 to 9, then [MIN, [MAX, [MED, [SM and ].

    Classes are not equally frequent: MIN and MAX produce many 0 and 9, about 17% and 16%; other digits have 7
    to 10%.

    Args:
        length: maximum number of tokens in an expression.
        min_length: minimum number of tokens in an expression.
        depth: maximum depth of the tree, counting the root and the digits.
        n_arguments: maximum number of arguments of an operator.

    Source: Nangia and Bowman (2018, arXiv:1804.06028), in the longer form of the Long Range Arena (Tay et
    al., 2020, arXiv:2011.04006), section 2.2.1, with the settings of its code: more than 500 and fewer than
    2,000 tokens, ten levels, up to ten arguments, 96,000 samples for training and 2,000 each for validation
    and testing.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> sizes = {"n_train": 3, "n_validation": 1, "n_test": 1, "cache": Path(tempfile.mkdtemp())}
        >>> task = ListOps(length=9, min_length=5, depth=3, n_arguments=3, **sizes)
        >>> batch = task.split("train").rows(torch.tensor([0]))
        >>> expression(batch.inputs[0, : batch.lengths[0]].tolist()), batch.targets[0].item()
        ('[SM 6 [MED 9 4 ] 8 ]', 0)
    """

    length: int = 1999
    min_length: int = 501
    depth: int = 10
    n_arguments: int = 10
    n_train: int = 96_000
    n_validation: int = 2_000
    n_test: int = 2_000
    vocab_size: ClassVar[int] = len(SYMBOLS)
    n_outputs: ClassVar[int] = 10
    least: ClassVar[Mapping[str, int]] = {"min_length": 1, "depth": 1, "n_arguments": 2}

    def check(self) -> None:
        """Require a range of lengths."""
        if self.length < self.min_length:
            raise ValueError(
                f"`length` must be at least `min_length` = {self.min_length}; got {self.length}."
            )

    def draw(self, random: np.random.Generator, n: int) -> LabelledTokens:
        """Draw at most n expressions and their values; fewer if expressions of these lengths are rare."""
        # imported here, so that the kernels are compiled only when samples are generated
        from linrec.lab.tasks import listops_kernels

        tokens = np.empty((n, self.length), np.uint8)
        values, lengths = np.empty(n, np.int64), np.empty(n, np.int64)
        found = listops_kernels.draw(
            random, self.depth, self.n_arguments, self.min_length, tokens, values, lengths
        )
        tensors = (torch.from_numpy(array[:found]) for array in (tokens, values, lengths))
        return LabelledTokens(*tensors)


def expression(tokens: Iterable[int]) -> str:
    """Return an expression as text.

    Args:
        tokens: a sequence of tokens without padding.
    """
    return " ".join(SYMBOLS[token] for token in tokens)


class Size(NamedTuple):
    """The Long Range Arena's settings for images of a size; see `Layout` of the kernels for the other fields.

    Args:
        margins: margins of `Layout`; each image has a random margin of this tuple.
        n_distracting: total number of paddles in all distractors.
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
"""Maximum number of paddles in a path, as published; small images have little room for more."""


class Drawing(NamedTuple):
    """Images, with the coordinates of their paths and disks.

    Args:
        images: shape (n, size, size), uint8.
        labels: 1 if the disks mark the ends of the same path, shape (n), int64.
        paddles: tail and head (x0, y0, x1, y1) of each paddle in pixels, shape (n, p, 4), float64: the first
            path, the second path, then distractors; NaN for unused rows.
        ends: indices of the paddle with a disk at its tail, and of the paddle with a disk at its head, shape
            (n, 2), int64.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    paddles: NDArray[np.float64]
    ends: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Pathfinder(LabelledTask):
    """Tell whether two disks mark the ends of the same dashed path (1) or of two paths (0).

    Every image has two paths of `contour_length` dashes, called paddles, that begin near each other; shorter
    paths as distractors; and two disks. A disk is at the tail of a path, the other disk at the head of the
    same path or of the other path. A path turns between two paddles, at a point with distance m (the margin)
    from both, by an angle a with a density proportional to cos(min(c |a|, pi / 2))^2. If all paddles are
    grown by m, they touch their neighbours in the path and no other paddle; the label is 1 if the paddles of
    the two disks are then connected.

    An image is a sequence of size^2 pixels, row by row, each a real number in [-1, 1] or a token.

    Args:
        size: rows and columns: 32, 64, 128 (Path-X) or 256.
        contour_length: number of paddles in each of the two paths: 14 is hard, 9 intermediate, 6 easy.
        tokens: whether pixels are tokens 0 to 255 instead of real numbers.

    Source: Linsley, Kim, Veerabadran, Windolf and Serre (2018, arXiv:1805.08315), in the sizes of the Long
    Range Arena, sections 2.2.5 and 2.2.6, with the settings of its code: paths of 14 paddles, and 200,000
    images, of which 80% are for training and 10% each for validation and testing.

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
    n_outputs: ClassVar[int] = 2
    not_drawn_from: ClassVar[tuple[str, ...]] = ("cache", "tokens")

    def check(self) -> None:
        """Require a size of the Arena, and paths that fit."""
        if self.size not in SIZES:
            raise ValueError(f"`size` must be one of {', '.join(map(str, SIZES))}; got {self.size}.")
        if not 3 <= self.contour_length <= LONGEST:
            raise ValueError(
                f"`contour_length` must be from 3 to {LONGEST}, so that the paths fit into the image; got "
                f"{self.contour_length}."
            )

    @property
    def vocab_size(self) -> int | None:
        """Vocabulary size: 256, or None for real-valued pixels."""
        return 256 if self.tokens else None

    @property
    def n_features(self) -> int | None:
        """Number of input features per step: 1, or None for tokens."""
        return None if self.tokens else 1

    def split(self, name: SplitName) -> LabelledTokens | SequentialSplit:
        """Return the images of a split."""
        found = self.labelled(name)
        if self.tokens:
            return found
        # mean and std of 0.5 map 0 .. 255 to -1 .. 1
        half = torch.tensor([0.5])
        return SequentialSplit(found.tokens[:, :, None], found.labels, mean=half, std=half)

    def draw(self, random: np.random.Generator, n: int) -> LabelledTokens:
        """Draw n images as sequences, with their labels."""
        drawing = self.drawing(random, n)
        tokens = torch.from_numpy(drawing.images).flatten(1)
        return LabelledTokens(tokens, torch.from_numpy(drawing.labels))

    def drawing(self, random: np.random.Generator, n: int) -> Drawing:
        """Draw n images, and return them with the coordinates of their paths and disks."""
        # imported here, so that the kernels are compiled only when samples are generated
        from linrec.lab.tasks import pathfinder_kernels

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
        """Return the layouts of images, a layout per margin; each image has a random layout."""
        from linrec.lab.tasks.pathfinder_kernels import Layout

        size = SIZES[self.size]
        shared = {name: float(v) for name, v in size._asdict().items() if name in Layout._fields}
        return tuple(
            Layout(window=float(self.size), margin=margin, **shared) for margin in map(float, size.margins)
        )
