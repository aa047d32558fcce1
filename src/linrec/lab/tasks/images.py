"""Base class of tasks that read images as sequences of pixels or rows."""

import abc
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from numpy.typing import NDArray
from torch import Tensor

from linrec.errors import unknown
from linrec.lab.tasks.base import Batch, SplitName, require_at_least
from linrec.lab.tasks.classification import ClassificationTask
from linrec.lab.tasks.drawing import split_generator
from linrec.lab.tasks.files import FileTask
from linrec.text import DataError

N_CLASSES = 10
Permutation: TypeAlias = Literal["random", "bit-reversal"]
NOISES = ("noise", "salt-and-pepper")
"""Kinds of noise in the names of probes, such as "noise 0.2"."""


class Images(NamedTuple):
    """Labelled images of equal size.

    Args:
        pixels: shape (n, rows, columns, channels), uint8.
        labels: class of each image, shape (n), uint8.
    """

    pixels: UInt8[np.ndarray, "n rows columns channels"]
    labels: UInt8[np.ndarray, "n"]


@dataclass(frozen=True, eq=False)
class SequentialSplit:
    """Images as sequences of pixels, normalised on access: a `Source`.

        inputs = (pixels / 255 + noise e - mean) / std,   e ~ N(0, 1)

    Attributes:
        pixels: pixels in the order of the sequence, shape (n, t, f), uint8.
        labels: class of each image, shape (n), int64.
        mean: mean of the training pixels divided by 255, for each feature of a step, shape (f).
        std: standard deviation of the training pixels divided by 255, shape (f).
        noise: standard deviation of the white noise e on pixels divided by 255, which are not clipped.
        stream: seed of e; see `white_noise`.
    """

    pixels: UInt8[Tensor, "n t f"]
    labels: Int64[Tensor, "n"]
    mean: Float[Tensor, "f"]
    std: Float[Tensor, "f"]
    noise: float = 0.0
    stream: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, index: Int64[Tensor, "b"]) -> Batch:
        """Return images as a batch, on the device of the split.

        Args:
            index: indices of images, shape (b), int64, on any device.

        Returns:
            Inputs, shape (b, t, f), float32; targets, shape (b), int64; `reset` None.
        """
        white = white_noise(self.stream, index, tuple(self.pixels.shape[1:])) if self.noise else None
        index = index.to(self.labels.device)
        pixels = self.pixels[index].float() / 255
        if white is not None:
            pixels = pixels + self.noise * white.to(pixels.device)
        return Batch((pixels - self.mean) / self.std, self.labels[index], None)

    def of_epoch(self, *, seed: int, epoch: int) -> "SequentialSplit":
        """Return the split itself: its images are the same in every epoch."""
        return self

    def to(self, device: torch.device | str) -> "SequentialSplit":
        """Return the split with its images on a device, as bytes."""
        names = ("pixels", "labels", "mean", "std")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


@dataclass(frozen=True, kw_only=True)
class ImageTask(FileTask, ClassificationTask):
    """Base class of tasks that classify images, read pixel by pixel or row by row, into ten classes.

    The last training images are held out for validation; the test split is the data set's own. Each channel
    is normalised with the mean and the standard deviation of the training split. The probes are the test
    images with noise.

    Args:
        path: path of the files.
        n_validation: number of training images, from the end, that are held out for validation.
        seed: seed of the random permutation and of the noise.
        permuted: whether the pixels of all images are permuted with the same permutation.
        permutation: the permutation: "random" depends on `seed`; "bit-reversal" sorts pixels by their index
            with its bits reversed.
        by_row: whether a step is a row of the image instead of a pixel.
        test_noise: standard deviations of white noise on the test images, in units of the pixels' range from
            black to white; see `probes`.
        test_salt_and_pepper: shares of the pixels of the test images that become black or white; see
            `probes`.

    Raises:
        ValueError: a field is out of range.

    Source: Lim et al. (2021), arXiv:2102.04877, section 7, for tests with both kinds of noise.
    """

    n_validation: int = 5000
    seed: int = 0
    permuted: bool = False
    permutation: Permutation = "random"
    by_row: bool = False
    test_noise: tuple[float, ...] = ()
    test_salt_and_pepper: tuple[float, ...] = ()
    n_outputs: ClassVar[int] = N_CLASSES
    n_columns: ClassVar[int]
    """Number of columns of an image."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, n_validation=1, seed=0)
        if self.permutation not in ("random", "bit-reversal"):
            raise unknown("`permutation`", self.permutation, ["random", "bit-reversal"])
        if self.permutation != "random" and not self.permuted:
            raise ValueError(
                f"`permutation` = {self.permutation!r} needs `permuted` = True; got `permuted` = False. Pass "
                "`permuted` too."
            )
        for name in ("test_noise", "test_salt_and_pepper"):
            object.__setattr__(self, name, tuple(float(level) for level in getattr(self, name)))
        if not all(0 < level < math.inf for level in self.test_noise):
            raise ValueError(
                f"`test_noise` must have positive and finite standard deviations; got {self.test_noise}. The "
                "test split has the images without noise."
            )
        if not all(0 < level <= 1 for level in self.test_salt_and_pepper):
            raise ValueError(
                "`test_salt_and_pepper` must have shares above 0 and at most 1; got "
                f"{self.test_salt_and_pepper}. The test split has the images without noise."
            )

    @property
    def vocab_size(self) -> int | None:
        """Vocabulary size; None for real-valued pixels."""
        return None

    @property
    def n_channels(self) -> int:
        """Number of channels of a pixel."""
        return 1

    @property
    def n_features(self) -> int | None:
        """Number of input features per step: the channels of a pixel, or of all pixels in a row."""
        return self.n_channels * (self.n_columns if self.by_row else 1)

    @cached_property
    def probes(self) -> Mapping[str, SequentialSplit]:
        """The test split with noise, by kind and level.

            "noise 0.2": pixels / 255 + 0.2 e, not clipped,   e ~ N(0, 1)
            "salt-and-pepper 0.1": black where u < 0.05, white where u >= 0.95,   u ~ U(0, 1)

        Every value has its own e, and every pixel its own u for all its channels. They depend only on `seed`
        and the image's index, and are the same at every level. Pixels are normalised after the noise.
        """
        if not (self.test_noise or self.test_salt_and_pepper):
            return {}
        test: SequentialSplit = self.split("test")
        white, salt = NOISES
        stream = (self.seed, zlib.crc32(white.encode()))
        found = {f"{white} {level}": replace(test, noise=level, stream=stream) for level in self.test_noise}
        pixels = test.pixels.reshape(len(test), -1, self.n_channels)
        random = split_generator(type(self).__name__, salt, self.seed)
        u = torch.from_numpy(random.random((*pixels.shape[:2], 1), np.float32))
        for level in self.test_salt_and_pepper:
            noisy = pixels.masked_fill(u < level / 2, 0).masked_fill(u >= 1 - level / 2, 255)
            found[f"{salt} {level}"] = replace(test, pixels=noisy.view_as(test.pixels))
        return found

    @abc.abstractmethod
    def images(self) -> Mapping[Literal["train", "test"], Images]:
        """Return the training and the test images of the data set.

        Raises:
            DataError: a file is missing, damaged, or of the wrong kind.
        """

    def steps(self, pixels: UInt8[np.ndarray, "n rows columns channels"]) -> UInt8[np.ndarray, "n t f"]:
        """Return images as sequences of pixels or rows, after the permutation."""
        n, rows, columns, channels = pixels.shape
        if self.by_row and columns != self.n_columns:
            raise DataError(
                f"the images of {self.path} must have {self.n_columns} columns to be read row by row; they "
                f"have {columns}."
            )
        sequences = pixels.reshape(n, rows * columns, channels)
        if self.permuted:
            sequences = sequences[:, _order(self.permutation, rows * columns, self.seed)]
        return sequences.reshape(n, rows, columns * channels) if self.by_row else sequences

    def read(self) -> dict[SplitName, Any]:
        """Read the files, and return all splits."""
        parts = self.images()
        train, test = parts["train"], parts["test"]
        n_train = len(train.labels) - self.n_validation
        if n_train < 1:
            raise DataError(
                f"`n_validation` must be less than the {len(train.labels)} training images of {self.path}; "
                f"got {self.n_validation}."
            )
        # normalise with statistics of the training split only
        mean, std = _statistics(train.pixels[:n_train])
        if not std.all():
            raise DataError(
                f"the training images of {self.path} have a channel that is constant; they cannot be learned."
            )
        pixels, test_pixels = self.steps(train.pixels), self.steps(test.pixels)

        def part(pixels: NDArray[np.uint8], labels: NDArray[np.uint8]) -> SequentialSplit:
            # the number of pixels per step
            per_step = pixels.shape[-1] // len(mean)
            return SequentialSplit(
                torch.from_numpy(pixels.copy()),
                torch.from_numpy(labels.astype(np.int64)),
                torch.from_numpy(mean).float().repeat(per_step),
                torch.from_numpy(std).float().repeat(per_step),
            )

        return {
            "train": part(pixels[:n_train], train.labels[:n_train]),
            "validation": part(pixels[n_train:], train.labels[n_train:]),
            "test": part(test_pixels, test.labels),
        }


def white_noise(
    stream: tuple[int, ...], index: Int64[Tensor, "b"], shape: tuple[int, ...]
) -> Float[Tensor, "b t f"]:
    """Return standard normal noise, a function of the stream and of each sample's index only, on the CPU.

    Args:
        stream: seed, at least 0 each.
        index: indices of samples, shape (b), int64, on any device.
        shape: shape of the noise of a sample, (t, f).
    """
    noise = np.empty((len(index), *shape), np.float32)
    for place, number in enumerate(index.tolist()):
        np.random.default_rng([*stream, number]).standard_normal(dtype=np.float32, out=noise[place])
    return torch.from_numpy(noise)


def _order(permutation: Permutation, n: int, seed: int) -> Int64[np.ndarray, "n"]:
    """Return the indices of the pixels in the order of the permutation."""
    if permutation == "random":
        return np.random.default_rng(seed).permutation(n)
    # the number of bits of the largest index; smaller indices are padded with zeros
    bits = max(1, (n - 1).bit_length())
    return np.array(sorted(range(n), key=lambda number: format(number, f"0{bits}b")[::-1]))


def _statistics(pixels: NDArray[np.uint8]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the exact mean and standard deviation of each channel of images divided by 255."""
    values = np.arange(256) / 255
    found = []
    for channel in np.moveaxis(pixels, -1, 0):
        counts = np.bincount(channel.reshape(-1), minlength=256)
        mean = float(counts @ values / counts.sum())
        found.append((mean, math.sqrt(counts @ (values - mean) ** 2 / counts.sum())))
    mean, std = np.array(found).T
    return mean, std
