"""Bouncing digits: predict the next frames of a video in which digits bounce off the edges.

Source: Srivastava, Mansimov and Salakhutdinov (2015), arXiv:1502.04681, section 3, for the videos, with
settings from their code; Ororbia and others (2020), arXiv:1810.07411, for videos of Fashion-MNIST, and for
testing models on another data set than their training data.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from linrec.lab.tasks.base import (
    PIECE,
    Batch,
    ObjectiveName,
    SplitName,
    StoredSource,
    errors_of_numbers,
)
from linrec.lab.tasks.drawing import split_generator
from linrec.lab.tasks.files import FileTask
from linrec.lab.tasks.images import SequentialImages
from linrec.text import DataError

__all__ = ["BouncingDigits", "Films"]

STEP = 0.1
"""Distance that a digit moves per frame, as a fraction of the free distance between the edges."""


@dataclass(frozen=True, eq=False)
class Films(StoredSource):
    """Videos of moving images, rendered on access: a `Source`.

        frame_t = max over the images of a video, each at its position at time t; then average pooling
        inputs_t = frame_t      targets_t = frame_{t+1}

    If frames are hidden from `shown` on, inputs have an additional last feature: the input is (frame_t, 0)
    for shown frames and (0, 1) for hidden frames. Only hidden frames are targets.

    Attributes:
        images: shape (m, h, w), uint8.
        chosen: indices of the images in each video, shape (n, k), int64.
        places: row and column of the upper left corner of each image, shape (n, t, k, 2), int64.
        size: rows and columns of a video, in pixels of the images.
        shrink: kernel size and stride of the average pooling.
        shown: number of shown frames; None shows all frames.
        redrawn: function that returns the videos of an epoch, from the keywords `seed` and `epoch`; None if
            all epochs share the same videos.

    Example:
        >>> dot, places = torch.full((1, 1, 1), 255, dtype=torch.uint8), torch.tensor([[[[0, 0]], [[1, 0]]]])
        >>> films = Films(dot, torch.tensor([[0]]), places, size=2, shrink=1, shown=None)
        >>> batch = films.rows(torch.tensor([0]))
        >>> batch.inputs.tolist(), batch.targets.tolist()
        ([[[1.0, 0.0, 0.0, 0.0]]], [[[0.0, 0.0, 1.0, 0.0]]])
    """

    images: UInt8[Tensor, "m h w"]
    chosen: Int64[Tensor, "n k"]
    places: Int64[Tensor, "n t k 2"]
    size: int
    shrink: int
    shown: int | None
    redrawn: Callable[..., "Films"] | None = None

    def __len__(self) -> int:
        return len(self.chosen)

    def rows(self, index: Int64[Tensor, "b"]) -> Batch:
        """Return videos as a batch: inputs and targets (b, t - 1, f), float32 from 0 (black) to 1."""
        frames = self.frames(index)
        inputs, targets = frames[:, :-1], frames[:, 1:]
        if self.shown is None:
            return Batch(inputs, targets, None)
        step = torch.arange(inputs.shape[1], device=frames.device)[:, None]
        hidden = (step >= self.shown).expand(len(frames), -1, 1)
        inputs = torch.cat([inputs.masked_fill(hidden, 0), hidden.float()], dim=-1)
        return Batch(inputs, targets.masked_fill(step < self.shown - 1, math.nan), None)

    def frames(self, index: Int64[Tensor, "b"]) -> Float[Tensor, "b t f"]:
        """Return the rendered frames of videos, with pixels in row-major order."""
        index = index.to(self.images.device)
        places, images = self.places[index], self.images[self.chosen[index]]
        height, width = images.shape[-2:]
        along = torch.arange(self.size, device=images.device)
        film = torch.arange(len(index), device=images.device)[:, None, None]
        frames = torch.zeros(1, dtype=torch.uint8, device=images.device)
        for image, corner in zip(images.unbind(1), places.unbind(2), strict=True):
            # row and column of the image at each pixel of the frame; may be outside of the image
            row, column = (along - corner[:, :, axis, None] for axis in (0, 1))
            inside = ((row >= 0) & (row < height))[..., None] & ((column >= 0) & (column < width))[:, :, None]
            rows = image[film, row.clamp(0, height - 1)]
            column = column.clamp(0, width - 1)[:, :, None].expand(-1, -1, self.size, -1)
            frames = torch.maximum(frames, rows.gather(-1, column) * inside)
        smaller = F.avg_pool2d(frames.float() / 255, self.shrink) if self.shrink > 1 else frames.float() / 255
        return smaller.flatten(2)

    def of_epoch(self, *, seed: int, epoch: int) -> "Films":
        """Return the videos of an epoch, on the same device: the same videos, or newly drawn videos."""
        if self.redrawn is None:
            return self
        return self.redrawn(seed=seed, epoch=epoch).to(self.images.device)


@dataclass(frozen=True, kw_only=True)
class BouncingDigits(FileTask):
    """Predict the next frames of a video of bouncing digits.

        x_1, ..., x_shown, hidden, ..., hidden   ->   x_{shown+1}, ..., x_length

    A video has `n_digits` images, drawn with replacement. The position p in [0, 1]^2 of an image is relative
    to the area in which the image fits into the frame. Initial positions and directions are uniform, and p
    moves by 0.1 per frame. At an edge, p is clamped and its velocity changes sign. Positions are rounded down
    to whole pixels; overlapping images are combined by the maximum.

    A step has the pixels of a frame as real numbers. From frame `shown` on, the pixels are 0, and an
    additional last feature is 1. The target of a step is the next frame. With `shown` None, all frames are
    shown, and every step predicts the next frame, which requires a causal model.

    The folder contains the four files of MNIST or Fashion-MNIST, as for `SequentialImages`. Videos for
    training and validation have images of the training file, of which the last images are for validation.
    Test videos have images of the test file.

    Args:
        path: the folder of the files.
        other: folder of another data set, whose test images make an additional test set; see `probes`.
        length: number of frames.
        shown: number of frames that are shown; None shows all frames.
        n_digits: number of images in a video.
        size: rows and columns of a video, in pixels.
        shrink: kernel size of the average pooling; 2 makes frames of 32 x 32.
        n_train: number of training videos, per epoch if `fresh`.
        n_validation: number of validation videos.
        n_test: number of test videos, also of the probe; scoring holds all their frames in memory.
        n_validation_images: number of training images that are held out for validation.
        fresh: whether every epoch draws new videos, as in the papers.
        seed: seed of the videos only.

    Source: Srivastava and others (2015): 20 frames of 64 x 64 with two digits, of which 10 are shown.

    Example:
        >>> task = BouncingDigits(path=Path("mnist"), shrink=2)
        >>> task.n_features, task.n_outputs
        (1025, 1024)
    """

    other: Path | None = None
    length: int = 20
    shown: int | None = 10
    n_digits: int = 2
    size: int = 64
    shrink: int = 1
    n_train: int = 10_000
    n_validation: int = 1_000
    n_test: int = 1_000
    n_validation_images: int = 5_000
    fresh: bool = True
    seed: int = 0
    per_sequence: ClassVar[bool] = False
    objective: ClassVar[ObjectiveName] = "regression"
    vocab_size: ClassVar[int | None] = None
    reset_token: ClassVar[int | None] = None
    wanted: ClassVar[str] = SequentialImages.wanted
    least: ClassVar[Mapping[str, int]] = dict(
        length=2,
        n_digits=1,
        size=1,
        shrink=1,
        n_train=1,
        n_validation=1,
        n_test=1,
        n_validation_images=1,
        seed=0,
    )

    def check(self) -> None:
        """Require hidden frames, and a size that can be shrunk."""
        if self.shown is not None and not 1 <= self.shown < self.length:
            raise ValueError(
                f"`shown` must be from 1 to `length` - 1 = {self.length - 1}, or None; got {self.shown}."
            )
        if self.size % self.shrink:
            raise ValueError(f"`shrink` must divide `size` = {self.size}; got {self.shrink}.")

    @property
    def n_features(self) -> int:
        """Number of input features per step: pixels, and with hidden frames a flag for hidden frames."""
        return self.n_outputs + (self.shown is not None)

    @property
    def n_outputs(self) -> int:
        """Real numbers per target: the pixels of a frame."""
        return (self.size // self.shrink) ** 2

    @cached_property
    def chance(self) -> float:
        """Mean squared error on the test split of always predicting a black frame."""
        return self._error(torch.zeros(self.n_outputs, dtype=torch.float64))

    @cached_property
    def trivial_score(self) -> float:
        """Mean squared error on the test split of always predicting the training targets' mean frame."""
        total, n = torch.zeros(self.n_outputs, dtype=torch.float64), 0
        for targets in _asked(self.split("train")):
            total, n = total + targets.sum(0), n + len(targets)
        return self._error(total / n)

    @cached_property
    def probes(self) -> Mapping[str, Films]:
        """Videos with the motion of the test split and images of `other`, by the folder's name."""
        if self.other is None:
            return {}
        images = self._images(self.other)["test"]
        return {self.other.resolve().name: self._films("test", images)}

    def score(self, predictions: Float[Tensor, "n t f"], split: Films) -> dict[str, Any]:
        """Return scores of predicted pixels for each step of each video.

        These are "mse", "mae" and "nrmse" of all pixels that have a target, and "mse_by_frame", a list of
        {"frame": number from 1, "mse"}.
        """
        scores: dict[str, Any] = dict(errors_of_numbers(predictions, split))
        squares = torch.zeros(self.length - 1, dtype=torch.float64)
        for index in torch.arange(len(split)).split(PIECE):
            error = predictions[index].cpu() - split.rows(index).targets.cpu()
            squares += error.double().square().mean(-1).sum(0)
        by_frame = (squares / len(split)).tolist()
        scores["mse_by_frame"] = [
            {"frame": step + 2, "mse": error} for step, error in enumerate(by_frame) if not math.isnan(error)
        ]
        return scores

    def read(self) -> dict[SplitName, Films]:
        """Read the files, and return all splits."""
        found = self._images(self.path)
        images, test = found["train"], found["test"]
        n_train = len(images) - self.n_validation_images
        if n_train < 1:
            raise DataError(
                f"`n_validation_images` must be less than the {len(images)} training images of {self.path}; "
                f"got {self.n_validation_images}."
            )
        # read the probe's files now, so that a missing file is reported before the training
        _ = self.probes
        train = self._films("train", images[:n_train])
        if self.fresh:
            train = dataclasses.replace(train, redrawn=functools.partial(self._fresh, train))
        return {
            "train": train,
            "validation": self._films("validation", images[n_train:]),
            "test": self._films("test", test),
        }

    def _images(self, path: Path | None) -> dict[str, NDArray[np.uint8]]:
        parts = SequentialImages(path=path).images()
        found: dict[str, NDArray[np.uint8]] = {name: part.pixels[..., 0] for name, part in parts.items()}
        _, rows, columns = found["train"].shape
        if max(rows, columns) > self.size:
            raise DataError(
                f"the images of {path} must fit into frames of `size` = {self.size} rows and columns; they "
                f"have {rows} x {columns}."
            )
        return found

    def _error(self, frame: Float[Tensor, "f"]) -> float:
        errors = [
            ((targets - frame).square().sum().item(), targets.numel())
            for targets in _asked(self.split("test"))
        ]
        return sum(error for error, _ in errors) / sum(n for _, n in errors)

    def _fresh(self, train: Films, *, seed: int, epoch: int) -> Films:
        chosen, places = self._drawn("train", train.images, 1 + epoch, seed)
        redrawn = functools.partial(self._fresh, train)
        return dataclasses.replace(train, chosen=chosen, places=places, redrawn=redrawn)

    def _films(self, name: SplitName, pixels: NDArray[np.uint8]) -> Films:
        # a copy, because the file's content is read-only
        images = torch.from_numpy(pixels.copy())
        return Films(images, *self._drawn(name, images), self.size, self.shrink, self.shown)

    def _drawn(self, name: SplitName, images: UInt8[Tensor, "m h w"], *more: int) -> tuple[Tensor, Tensor]:
        """Return the indices of the images in each video of a split, and their positions in its frames."""
        n = {"train": self.n_train, "validation": self.n_validation, "test": self.n_test}[name]
        random = split_generator(type(self).__name__, name, self.seed, *more)
        chosen = random.integers(0, len(images), (n, self.n_digits))
        place = random.random((n, self.n_digits, 2))
        angle = random.uniform(0, 2 * math.pi, (n, self.n_digits))
        velocity = STEP * np.stack([np.sin(angle), np.cos(angle)], axis=-1)
        free = np.array([self.size - side for side in images.shape[1:]])
        places = np.empty((n, self.length, self.n_digits, 2), np.int64)
        for frame in range(self.length):
            place = place + velocity
            velocity = np.where((place <= 0) | (place >= 1), -velocity, velocity)
            place = place.clip(0, 1)
            places[:, frame] = place * free
        return torch.from_numpy(chosen), torch.from_numpy(places)


def _asked(films: Films) -> Iterator[Float[Tensor, "n f"]]:
    """Yield the target frames, in batches of videos."""
    for index in torch.arange(len(films)).split(PIECE):
        targets = films.rows(index).targets.flatten(0, 1)
        yield targets[~targets[:, 0].isnan()].double()
