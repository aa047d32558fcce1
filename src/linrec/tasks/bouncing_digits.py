"""Bouncing digits: say how a film goes on in which digits move, and bounce off its edges.

Source: Srivastava, Mansimov and Salakhutdinov (2015), arXiv:1502.04681, section 3, for the films, the numbers
from their code; Ororbia and others (2020), arXiv:1810.07411, for those of Fashion-MNIST, and for models that
are tested on another data set than that of their training.
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

from linrec.tasks.base import PIECE, Batch, ObjectiveName, SplitName, errors_of_numbers, require_at_least
from linrec.tasks.distinct import split_generator
from linrec.tasks.files import FileTask
from linrec.tasks.sequential_images import SequentialImages
from linrec.text import DataError

__all__ = ["BouncingDigits", "Films"]

STEP = 0.1
"""How far a digit moves from frame to frame, as a share of the way that it has from edge to edge."""


@dataclass(frozen=True, eq=False)
class Films:
    """Films of images that move, painted as they are read: a `Source`.

        frame_t = max over the images of a film, each at its place of t; then means of squares of pixels
        inputs_t = frame_t      targets_t = frame_{t+1}

    Where films are hidden from frame `shown` on, inputs have a last feature: they are (frame_t, 0) before,
    and (0, 1) from then on; there are targets for the frames that are hidden alone.

    Attributes:
        images: shape (m, h, w), uint8.
        chosen: images of each film, shape (n, k), int64.
        places: row and column of the upper left corner of each, shape (n, t, k, 2), int64.
        size: rows and columns of a film, in pixels of the images.
        shrink: rows and columns of the squares that are one pixel of a frame.
        shown: frames that are shown; None shows all.
        redrawn: gives the films of an epoch, from the keywords `seed` and `epoch`, where they differ.

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
        """Return films as a batch, on the device that the images are on.

        Args:
            index: numbers of films, shape (b), int64, on any device.

        Returns:
            Inputs and targets, shape (b, t - 1, f), float32 from 0, black, to 1; no `reset`.
        """
        frames = self.frames(index)
        inputs, targets = frames[:, :-1], frames[:, 1:]
        if self.shown is None:
            return Batch(inputs, targets, None)
        step = torch.arange(inputs.shape[1], device=frames.device)[:, None]
        hidden = (step >= self.shown).expand(len(frames), -1, 1)
        inputs = torch.cat([inputs.masked_fill(hidden, 0), hidden.float()], dim=-1)
        return Batch(inputs, targets.masked_fill(step < self.shown - 1, math.nan), None)

    def frames(self, index: Int64[Tensor, "b"]) -> Float[Tensor, "b t f"]:
        """Paint the frames of films, row after row of pixels."""
        index = index.to(self.images.device)
        places, images = self.places[index], self.images[self.chosen[index]]
        height, width = images.shape[-2:]
        along = torch.arange(self.size, device=images.device)
        film = torch.arange(len(index), device=images.device)[:, None, None]
        frames = torch.zeros(1, dtype=torch.uint8, device=images.device)
        for image, corner in zip(images.unbind(1), places.unbind(2), strict=True):
            # which row and column of the image a pixel of the frame shows, if any
            row, column = (along - corner[:, :, axis, None] for axis in (0, 1))
            inside = ((row >= 0) & (row < height))[..., None] & ((column >= 0) & (column < width))[:, :, None]
            rows = image[film, row.clamp(0, height - 1)]
            column = column.clamp(0, width - 1)[:, :, None].expand(-1, -1, self.size, -1)
            frames = torch.maximum(frames, rows.gather(-1, column) * inside)
        smaller = F.avg_pool2d(frames.float() / 255, self.shrink) if self.shrink > 1 else frames.float() / 255
        return smaller.flatten(2)

    def of_epoch(self, *, seed: int, epoch: int) -> "Films":
        """Return the films of an epoch: these, or what is drawn for it, on the same device."""
        if self.redrawn is None:
            return self
        return self.redrawn(seed=seed, epoch=epoch).to(self.images.device)

    def to(self, device: torch.device | str) -> "Films":
        """Return the films with their images, which are not painted yet, on a device."""
        images, chosen, places = (t.to(device) for t in (self.images, self.chosen, self.places))
        return dataclasses.replace(self, images=images, chosen=chosen, places=places)


@dataclass(frozen=True, kw_only=True)
class BouncingDigits(FileTask):
    """Say how a film of digits goes on, and the configuration that says of which digits.

        x_1, ..., x_shown, hidden, ..., hidden   ->   x_{shown+1}, ..., x_length

    A film has `n_digits` images, drawn with replacement, at places p in [0, 1]^2 of the square in which they
    fit. Places are uniform at first, directions too, and p moves by 0.1 from frame to frame. Where that would
    lead beyond an edge, p stays at the edge, and its velocity turns around. Places are rounded down to whole
    pixels; where images meet, the brighter pixel is seen.

    A step has the pixels of a frame, as real numbers; from `shown` on zeros, and a last feature that says so.
    The target of a step is the next frame. With `shown` None all frames are given, and each step asks for the
    next one; a model must not look ahead then.

    The folder has the four files of MNIST or of Fashion-MNIST, as that of `SequentialImages`. Films of
    training and validation have images of the training file, the last ones validate; those that test have
    images of the test file.

    Args:
        path: the folder.
        other: another such folder, whose test images make further test films, see `probes`.
        length: frames.
        shown: how many of them are shown; None shows all.
        n_digits: images of a film.
        size: rows and columns of a film.
        shrink: rows and columns of the squares of pixels whose mean is a pixel of a frame: 2 makes 32 x 32.
        n_train: films of the training split, or of an epoch.
        n_validation: films of the validation split.
        n_test: films of the test split, and of the probe. Scores take the memory of all their frames.
        n_validation_images: how many of the training images validate.
        fresh: whether every epoch has films of its own, as in the papers.
        seed: seed of the films alone.

    Raises:
        ValueError: a field is out of range.

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

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "other", None if self.other is None else Path(self.other).expanduser())
        require_at_least(self, length=2, n_digits=1, size=1, shrink=1, n_train=1, n_validation=1, n_test=1)
        require_at_least(self, n_validation_images=1, seed=0)
        if self.shown is not None and not 1 <= self.shown < self.length:
            raise ValueError(
                f"`shown` must be from 1 to `length` - 1 = {self.length - 1}, or None; got {self.shown}."
            )
        if self.size % self.shrink:
            raise ValueError(f"`shrink` must divide `size` = {self.size}; got {self.shrink}.")

    @property
    def n_features(self) -> int:
        """Real numbers per step: pixels, and, where frames are hidden, whether this one is."""
        return self.n_outputs + (self.shown is not None)

    @property
    def n_outputs(self) -> int:
        """Real numbers in a target: the pixels of a frame."""
        return (self.size // self.shrink) ** 2

    @cached_property
    def chance(self) -> float:
        """Mean squared error on the test split of always answering a black frame."""
        return self._error(torch.zeros(self.n_outputs, dtype=torch.float64))

    @cached_property
    def trivial_score(self) -> float:
        """Mean squared error on the test split of always answering the mean frame of the training targets."""
        total, n = torch.zeros(self.n_outputs, dtype=torch.float64), 0
        for targets in _asked(self.split("train")):
            total, n = total + targets.sum(0), n + len(targets)
        return self._error(total / n)

    @cached_property
    def probes(self) -> Mapping[str, Films]:
        """Films of the same places as those of the test split, with images of `other`, by its name."""
        if self.other is None:
            return {}
        images = self._images(self.other)["test"]
        return {self.other.resolve().name: self._films("test", images)}

    def score(self, predictions: Float[Tensor, "n t f"], split: Films) -> dict[str, Any]:
        """Compare predictions with the targets of a split.

        Args:
            predictions: pixels for each step of each film, shape (n, length - 1, f), on any device.
            split: what was predicted.

        Returns:
            "mse", "mae" and "nrmse" of all pixels that have a target, and "mse_by_frame", a list of
            {"frame": number from 1, "mse"}.

        Raises:
            ValueError: `predictions` has another shape than the targets.
            TypeError: `predictions` are no real numbers.
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
        """Read the files, and return all splits.

        Raises:
            DataError: one is missing, damaged, or something else than it should be.
        """
        found = self._images(self.path)
        images, test = found["train"], found["test"]
        n_train = len(images) - self.n_validation_images
        if n_train < 1:
            raise DataError(
                f"`n_validation_images` must be less than the {len(images)} training images of {self.path}; "
                f"got {self.n_validation_images}."
            )
        # training is long, and what is missing after it had better be known before
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
        # of a file's content, which is not for writing
        images = torch.from_numpy(pixels.copy())
        return Films(images, *self._drawn(name, images), self.size, self.shrink, self.shown)

    def _drawn(self, name: SplitName, images: UInt8[Tensor, "m h w"], *more: int) -> tuple[Tensor, Tensor]:
        """Return which images each film of a split has, and their places in its frames."""
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
    """Yield the frames that are asked for, some films at once."""
    for index in torch.arange(len(films)).split(PIECE):
        targets = films.rows(index).targets.flatten(0, 1)
        yield targets[~targets[:, 0].isnan()].double()
