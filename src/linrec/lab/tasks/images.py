"""Tasks of images as sequences of pixels or rows: their base class, and MNIST and Fashion-MNIST."""

import abc
import gzip
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from numpy.typing import NDArray
from torch import Tensor

from linrec.lab.tasks.base import Batch, SplitName, StoredSource
from linrec.lab.tasks.drawing import split_generator
from linrec.lab.tasks.files import FileTask
from linrec.lab.tasks.labelled import ClassificationTask
from linrec.text import DataError

__all__ = ["ImageTask", "Images", "SequentialImages", "white_noise"]

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
class SequentialSplit(StoredSource):
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
        """Return images as a batch: inputs (b, t, f), float32; and targets (b), int64."""
        white = white_noise(self.stream, index, tuple(self.pixels.shape[1:])) if self.noise else None
        index = index.to(self.labels.device)
        pixels = self.pixels[index].float() / 255
        if white is not None:
            pixels = pixels + self.noise * white.to(pixels.device)
        return Batch((pixels - self.mean) / self.std, self.labels[index], None)


@dataclass(frozen=True, kw_only=True)
class ImageTask(FileTask, ClassificationTask):
    """Base class of tasks that classify images, read pixel by pixel or row by row.

    The last training images are held out for validation; the test split is the data set's own. Each channel
    is normalised with the mean and the standard deviation of the training split. The probes are the test
    images with noise.

    Args:
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

    Source: Lim et al. (2021), arXiv:2102.04877, section 7, for tests with both kinds of noise.
    """

    n_validation: int = 5000
    seed: int = 0
    permuted: bool = False
    permutation: Permutation = "random"
    by_row: bool = False
    test_noise: tuple[float, ...] = ()
    test_salt_and_pepper: tuple[float, ...] = ()
    least: ClassVar[Mapping[str, int]] = {"n_validation": 1, "seed": 0}
    n_columns: ClassVar[int]
    """Number of columns of an image."""

    def check(self) -> None:
        """Require a permutation where it has a kind, and levels of noise in their ranges."""
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
    def n_outputs(self) -> int:
        """Number of target classes."""
        return N_CLASSES

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


# file names of both data sets, with or without .gz
FILES: Mapping[str, tuple[str, str]] = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
WHERE = (
    "Debian's package dataset-fashion-mnist installs the files of Fashion-MNIST in "
    "/usr/share/datasets/fashion-mnist; the files of MNIST are at "
    "https://ossci-datasets.s3.amazonaws.com/mnist/. Pass the folder with --data.path."
)
# magic number of the IDX format: two zeros, 8 for unsigned bytes; the number of axes follows
UNSIGNED_BYTES = b"\x00\x00\x08"


@dataclass(frozen=True, kw_only=True)
class SequentialImages(ImageTask):
    """Classify an image of MNIST or Fashion-MNIST that is read pixel by pixel.

        target = label, given x_1, ..., x_784

    The folder contains the four files of MNIST or Fashion-MNIST in the IDX format, plain or with .gz:
    train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte, t10k-labels-idx1-ubyte. An
    image of 28 x 28 pixels is a sequence of 784 steps, row by row. In the permuted task, the pixels of all
    images are permuted with the same permutation, which destroys local structure.

    Args:
        path: the folder of the files.
        by_row: whether a step is a row of 28 pixels instead of a pixel.

    Source: Le, Jaitly and Hinton (2015, arXiv:1504.00941), section 4.2, for both tasks; S4's code (Gu, Goel
    and Ré, 2022) for bit reversal; MNIST (LeCun, Bottou, Bengio and Haffner, 1998) and Fashion-MNIST (Xiao,
    Rasul and Vollgraf, 2017) for the data.

    Example:
        >>> task = SequentialImages(path=Path("fashion-mnist"), permuted=True)
        >>> task.n_features, task.n_outputs, task.chance
        (1, 10, 0.1)
    """

    wanted: ClassVar[str] = f"It must be a folder with the four files of MNIST or Fashion-MNIST. {WHERE}"
    n_columns: ClassVar[int] = 28

    def images(self) -> dict[Literal["train", "test"], Images]:
        """Return the training and the test images."""
        folder = self.folder()
        train, test = _read_pair(folder, "train"), _read_pair(folder, "test")
        sizes = [images.pixels.shape[1:3] for images in (train, test)]
        if sizes[0] != sizes[1]:
            of_train, of_test = (f"{rows} x {columns}" for rows, columns in sizes)
            raise DataError(
                f"the images of {folder} must all have the same size; training images have {of_train} "
                f"pixels, test images {of_test}. The files are of different data sets."
            )
        return {"train": train, "test": test}


def _read_pair(folder: Path, part: str) -> Images:
    """Return the images of a part of the data set, checked against their labels."""
    of_images, of_labels = FILES[part]
    images, labels = _read_idx(folder, of_images, n_axes=3), _read_idx(folder, of_labels, n_axes=1)
    if len(images) != len(labels):
        raise DataError(
            f"{folder} must have as many labels as images; {of_images} has {len(images)}, {of_labels} "
            f"{len(labels)}. The files are of different data sets."
        )
    if not images.size:
        raise DataError(f"{of_images} in {folder} has no pixels: its shape is {images.shape}.")
    if labels.max() >= N_CLASSES:
        raise DataError(
            f"the labels of {of_labels} in {folder} must be 0 to {N_CLASSES - 1}; got {labels.max()}. "
            "Only data sets of ten classes are read."
        )
    return Images(images[..., None], labels)


def _read_idx(folder: Path, name: str, *, n_axes: int) -> NDArray[np.uint8]:
    """Return the array of an IDX file of unsigned bytes: magic number, sizes as big-endian int32, bytes."""
    path = next((p for p in (folder / name, folder / f"{name}.gz") if p.exists()), None)
    if path is None:
        raise DataError(f"{folder} has neither {name} nor {name}.gz, which is one of the four files. {WHERE}")
    try:
        raw = path.read_bytes()
        content = gzip.decompress(raw) if path.suffix == ".gz" else raw
    except EOFError as error:
        raise DataError(f"{path} is truncated: the compressed data have no end. Get it again.") from error
    # before OSError, because BadGzipFile is a subclass
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"{path} is not a gzip file, or it is damaged: {error}. Get it again, or remove .gz from its "
            "name if it is not compressed."
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    start = 4 * (1 + n_axes)
    magic = UNSIGNED_BYTES + bytes([n_axes])
    if content[:4] != magic:
        raise DataError(
            f"{path} must be an IDX file of {n_axes} axes of unsigned bytes, beginning with {magic.hex()}; "
            f"it begins with {content[:4].hex() or 'nothing'}. Get it again, or restore its own name."
        )
    shape = tuple(np.frombuffer(content[4:start], dtype=">i4").tolist()) if len(content) >= start else ()
    n_bytes = math.prod(shape)
    if not shape or len(content) - start != n_bytes:
        says = f"{n_bytes} bytes of shape {shape}" if shape else f"sizes in its first {start} bytes"
        raise DataError(
            f"{path} must have {says}; it has {max(0, len(content) - start)} after its header. "
            "It is truncated or damaged: get it again."
        )
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)
