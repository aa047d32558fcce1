"""Generation of images: predict every pixel from the pixels before it, with MNIST, CIFAR-10 and CIFAR-100."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from numpy.typing import NDArray
from torch import Tensor

from linrec.lab.tasks.base import Batch, ObjectiveName, SplitName, StoredSource
from linrec.lab.tasks.cifar import SequentialCIFAR, read_cifar
from linrec.lab.tasks.files import FileTask
from linrec.lab.tasks.images import SequentialImages
from linrec.text import DataError

__all__ = ["ByteSplit", "ByteTask", "ImageGeneration"]

VALUES = 256
"""Number of values of a byte; also the token before the first one."""
ImageSet: TypeAlias = Literal["mnist", "cifar10", "cifar100"]


@dataclass(frozen=True, eq=False)
class ByteSplit(StoredSource):
    """Sequences of bytes p that are predicted one by one: a `Source`.

        inputs = 256, p_1, ..., p_{T-1}      targets = p_1, ..., p_T

    Attributes:
        values: p, shape (n, T), uint8.

    Example:
        >>> batch = ByteSplit(torch.tensor([[7, 8, 9]], dtype=torch.uint8)).rows(torch.tensor([0]))
        >>> batch.inputs.tolist(), batch.targets.tolist()
        ([[256, 7, 8]], [[7, 8, 9]])
    """

    values: UInt8[Tensor, "n t"]

    def __len__(self) -> int:
        return len(self.values)

    def rows(self, index: Int64[Tensor, "b"]) -> Batch:
        """Return sequences as a batch: inputs and targets (b, T), int64."""
        targets = self.values[index.to(self.values.device)].long()
        first = targets.new_full((len(targets), 1), VALUES)
        return Batch(torch.cat([first, targets[:, :-1]], 1), targets, None)


@dataclass(frozen=True, kw_only=True)
class ByteTask(FileTask):
    """Base class of tasks that predict every byte from the bytes before it, of splits of bytes."""

    per_sequence: ClassVar[bool] = False
    objective: ClassVar[ObjectiveName] = "classification"
    n_features: ClassVar[int | None] = None
    vocab_size: ClassVar[int] = VALUES + 1
    n_outputs: ClassVar[int] = VALUES + 1
    chance: ClassVar[float] = 1 / (VALUES + 1)
    reset_token: ClassVar[int | None] = None

    @cached_property
    def trivial_score(self) -> float:
        """Accuracy on the test split of always predicting the most frequent training value."""
        majority = self.split("train").values.flatten().bincount().argmax()
        return float((self.split("test").values == majority).double().mean())


@dataclass(frozen=True, kw_only=True)
class ImageGeneration(ByteTask):
    """Predict every value of an image from the values before it.

        target_t = p_t, given 256, p_1, ..., p_{t-1}      bits per dimension = loss / ln 2

    An image of MNIST or Fashion-MNIST is a sequence of 784 values, an image of CIFAR a sequence of 3,072:
    red, green and blue of each pixel, row by row. `linrec.generation.generate` with `vocab_size=256`
    continues the token 256, or the token 256 and the upper half of an image, which completes the image. The
    last training images are held out for validation; the test split is the data set's own.

    Args:
        path: the files, as of `SequentialImages` for "mnist", and of `SequentialCIFAR` for CIFAR.
        images: "mnist" also reads Fashion-MNIST.
        n_validation: number of training images, from the end, that are held out for validation.

    Source: Katharopoulos, Vyas, Pappas and Fleuret (2020, arXiv:2006.16236), section 4.2: linear transformers
    have 0.644 bits per dimension on MNIST and 3.40 on CIFAR-10.

    Example:
        >>> task = ImageGeneration(images="cifar10")
        >>> task.vocab_size, task.n_outputs
        (257, 257)
    """

    images: ImageSet = "mnist"
    n_validation: int = 5000
    least: ClassVar[Mapping[str, int]] = {"n_validation": 1}
    wanted: ClassVar[str] = (
        f'For `images` = "mnist", the default: {SequentialImages.wanted} For "cifar10" and "cifar100": '
        f"{SequentialCIFAR.wanted}"
    )

    def read(self) -> dict[SplitName, ByteSplit]:
        """Read the files, and return all splits."""
        path = self.existing()
        if self.images == "mnist":
            parts = SequentialImages(path=path).images()
        else:
            parts = read_cifar(path, 10 if self.images == "cifar10" else 100)
        train, test = parts["train"].pixels, parts["test"].pixels
        if self.n_validation >= len(train):
            raise DataError(
                f"`n_validation` must be less than the {len(train)} training images of {path}; got "
                f"{self.n_validation}."
            )

        def part(pixels: NDArray[np.uint8]) -> ByteSplit:
            return ByteSplit(torch.from_numpy(pixels.reshape(len(pixels), -1).copy()))

        held_out = len(train) - self.n_validation
        return {"train": part(train[:held_out]), "validation": part(train[held_out:]), "test": part(test)}
