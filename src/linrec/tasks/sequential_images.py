"""Sequential images: say what a picture of MNIST or Fashion-MNIST shows after reading it pixel by pixel.

An image of 28 x 28 is a sequence of 784 steps, row after row, of one number each. In the permuted task the
pixels of all images come in one and the same random order, which takes away what neighbours tell.

Source: Le, Jaitly and Hinton (2015), arXiv:1504.00941, section 4.2, for both orders. The data: MNIST (LeCun,
Bottou, Bengio and Haffner, 1998) and Fashion-MNIST (Xiao, Rasul and Vollgraf, 2017), of the same shape.
"""

import gzip
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from numpy.typing import NDArray
from torch import Tensor

from linrec.errors import unknown
from linrec.tasks.base import SPLIT_NAMES, Batch, ObjectiveName, SplitName, scores_by_class
from linrec.text import DataError

__all__ = ["SequentialImages", "SequentialSplit"]

N_CLASSES = 10
# the names that both data sets have, with or without .gz
FILES: Mapping[str, tuple[str, str]] = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
WHERE = (
    "Debian's package dataset-fashion-mnist puts those of Fashion-MNIST into "
    "/usr/share/datasets/fashion-mnist: pass it with --data.path."
)
# of the IDX format: two zeros, 8 for unsigned bytes, then the number of axes
UNSIGNED_BYTES = b"\x00\x00\x08"


@dataclass(frozen=True, eq=False)
class SequentialSplit:
    """Images as sequences of pixels, normalised as they are read: a `Source`.

        inputs = (pixels / 255 - mean) / std

    Attributes:
        pixels: in the order of reading, shape (n, t), uint8.
        labels: class of each image, shape (n), int64.
        mean: mean of the training pixels, of which 1 is white.
        std: their standard deviation.
    """

    pixels: UInt8[Tensor, "n t"]
    labels: Int64[Tensor, "n"]
    mean: float
    std: float

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, index: Int64[Tensor, "b"]) -> Batch:
        """Return images as a batch, on the device that the split is on.

        Args:
            index: numbers of images, shape (b), int64, on any device.

        Returns:
            Inputs, shape (b, t, 1), float32; targets, shape (b), int64; no `reset`.
        """
        index = index.to(self.labels.device)
        pixels = self.pixels[index].float() / 255
        return Batch(((pixels - self.mean) / self.std)[:, :, None], self.labels[index], None)

    def of_epoch(self, *, seed: int, epoch: int) -> "SequentialSplit":
        """Return the split itself: its images are the same in every epoch."""
        return self

    def to(self, device: torch.device | str) -> "SequentialSplit":
        """Return the split with its images on a device, where a byte is a pixel."""
        return SequentialSplit(self.pixels.to(device), self.labels.to(device), self.mean, self.std)


@dataclass(frozen=True)
class SequentialImages:
    """The class of an image that is read pixel by pixel, and the configuration that says of which images.

        target = label      after x_1, ..., x_784

    The folder has the four files of MNIST or of Fashion-MNIST in the IDX format, plain or with .gz:
    train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte, t10k-labels-idx1-ubyte. The last
    training images validate, and the test split is the data set's own. The data depends on the fields and on
    the files.

    Args:
        path: the folder.
        permuted: whether the pixels of all images come in one random order.
        n_validation: how many of the training images, the last ones, validate.
        seed: seed of that order alone.

    Raises:
        ValueError: a field is out of range.

    Source: Le, Jaitly and Hinton (2015), section 4.2.

    Example:
        >>> task = SequentialImages(path=Path("fashion-mnist"), permuted=True)
        >>> task.n_features, task.n_outputs, task.chance
        (1, 10, 0.1)
    """

    path: Path | None = None
    permuted: bool = False
    n_validation: int = 5000
    seed: int = 0
    section: ClassVar[str] = "data"
    n_features: ClassVar[int | None] = 1
    per_sequence: ClassVar[bool] = True
    objective: ClassVar[ObjectiveName] = "classification"

    def __post_init__(self) -> None:
        # a configuration that was stored as JSON has strings
        object.__setattr__(self, "path", None if self.path is None else Path(self.path))
        for name, least in (("n_validation", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"`{name}` must be at least {least}; got {getattr(self, name)}.")

    @property
    def vocab_size(self) -> None:
        """There are no tokens: a step is a real number."""
        return None

    @property
    def n_outputs(self) -> int:
        """Number of target classes."""
        return N_CLASSES

    @property
    def chance(self) -> float:
        """Expected accuracy of a uniform guess: 0.1."""
        return 1 / N_CLASSES

    @cached_property
    def trivial_score(self) -> float:
        """Test accuracy of always answering the most frequent class of the training split."""
        majority = torch.bincount(self.split("train").labels).argmax()
        return float((self.split("test").labels == majority).double().mean())

    @property
    def reset_token(self) -> None:
        """There is none: an image is a sequence of its own."""
        return None

    def prepared(self) -> "SequentialImages":
        """Return the task itself, once its files are read.

        Raises:
            DataError: the folder or a file is missing, damaged, or something else than it should be.
        """
        self.split("train")
        return self

    def split(self, name: SplitName) -> SequentialSplit:
        """Return the images of one split.

        Args:
            name: "train", "validation" or "test".

        Raises:
            ValueError: there is no such split.
            DataError: what `prepared` raises.
        """
        if name not in SPLIT_NAMES:
            raise unknown("split", name, SPLIT_NAMES)
        return self._splits[name]

    def score(self, predictions: Int64[Tensor, "n"], split: SequentialSplit) -> dict[str, Any]:
        """Compare predictions with the labels of a split.

        Args:
            predictions: predicted classes, shape (n), on any device.
            split: what was predicted.

        Returns:
            A dictionary that JSON can hold: "accuracy", the share of images whose class is predicted, and
            "accuracy_by_class", that of each class, None where the split has no image of it.

        Raises:
            ValueError: `predictions` has another shape than the labels.
            TypeError: `predictions` are not integers (pass classes, not logits).
        """
        return scores_by_class(predictions, split.labels, N_CLASSES)

    @cached_property
    def _splits(self) -> dict[SplitName, SequentialSplit]:
        folder = self._folder()
        images, labels = _read_pair(folder, "train")
        test_images, test_labels = _read_pair(folder, "test")
        n_train = len(images) - self.n_validation
        if n_train < 1:
            raise DataError(
                f"`n_validation` must be less than the {len(images)} training images of {folder}; "
                f"got {self.n_validation}."
            )
        length = images.shape[1]
        if test_images.shape[1] != length:
            raise DataError(
                f"the images of {folder} must all have the same size; those for training have {length} "
                f"pixels, those for testing {test_images.shape[1]}. The files are of different data sets."
            )
        # what is known of the pixels is known from training alone
        counts = np.bincount(images[:n_train].reshape(-1), minlength=256)
        values = np.arange(256) / 255
        mean = float(counts @ values / counts.sum())
        std = math.sqrt(counts @ (values - mean) ** 2 / counts.sum())
        if not std > 0:
            raise DataError(
                f"the training images of {folder} are all of one colour; they cannot be told apart."
            )
        if self.permuted:
            order = np.random.default_rng(self.seed).permutation(length)
            images, test_images = images[:, order], test_images[:, order]

        def part(pixels: NDArray[np.uint8], of: NDArray[np.uint8]) -> SequentialSplit:
            return SequentialSplit(
                torch.from_numpy(pixels.copy()), torch.from_numpy(of.astype(np.int64)), mean, std
            )

        return {
            "train": part(images[:n_train], labels[:n_train]),
            "validation": part(images[n_train:], labels[n_train:]),
            "test": part(test_images, test_labels),
        }

    def _folder(self) -> Path:
        wanted = f"It must have the four files of MNIST or Fashion-MNIST. {WHERE}"
        if self.path is None:
            raise DataError(f"`path` must be the folder of the images; got none. {wanted}")
        if not self.path.exists():
            raise DataError(f"there is no folder {self.path}. {wanted}")
        if not self.path.is_dir():
            raise DataError(f"{self.path} is no folder. {wanted}")
        return self.path


def _read_pair(folder: Path, part: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return images (n, t) and labels (n) of a part of the data set, checked against each other."""
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
    return images.reshape(len(images), -1), labels


def _read_idx(folder: Path, name: str, *, n_axes: int) -> NDArray[np.uint8]:
    """Return the array of an IDX file of unsigned bytes: magic number, sizes as big-endian int32, bytes."""
    path = next((p for p in (folder / name, folder / f"{name}.gz") if p.exists()), None)
    if path is None:
        raise DataError(f"{folder} has neither {name} nor {name}.gz, which is one of the four files. {WHERE}")
    try:
        raw = path.read_bytes()
        content = gzip.decompress(raw) if path.suffix == ".gz" else raw
    except EOFError as error:
        raise DataError(f"{path} is cut off: its compressed data has no end. Get the file again.") from error
    # before OSError, of which it is one
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"{path} is no gzip file, or damaged: {error}. Get it again, or drop .gz from its name if it is "
            "not compressed."
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    start = 4 * (1 + n_axes)
    magic = UNSIGNED_BYTES + bytes([n_axes])
    if content[:4] != magic:
        raise DataError(
            f"{path} must be an IDX file of {n_axes} axes of unsigned bytes, beginning with {magic.hex()}; "
            f"it begins with {content[:4].hex() or 'nothing'}. Get the file again, or give it its own name."
        )
    shape = tuple(np.frombuffer(content[4:start], dtype=">i4").tolist()) if len(content) >= start else ()
    n_bytes = math.prod(shape)
    if not shape or len(content) - start != n_bytes:
        says = f"{n_bytes} bytes of shape {shape}" if shape else f"sizes in its first {start} bytes"
        raise DataError(
            f"{path} must have {says}; it has {max(0, len(content) - start)} after its header. "
            "It is cut off or damaged: get it again."
        )
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)
