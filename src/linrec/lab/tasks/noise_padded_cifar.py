"""Noise-padded CIFAR-10: classify an image long after it was read row by row.

The 32 rows of an image are followed by noise, so that a model must remember the image for nearly a thousand
steps.

Source: Chang, Chen, Haber and Chi (2019), arXiv:1902.09689, section 5; coRNN (Rusch and Mishra, 2021),
arXiv:2010.00951, has the same setting with 96 features and 1,000 steps.
"""

import zlib
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from linrec.errors import unknown
from linrec.lab.tasks.base import Batch, SplitName, require_at_least
from linrec.lab.tasks.cifar_files import CHANNELS, SIDE
from linrec.lab.tasks.classification import ClassificationTask
from linrec.lab.tasks.files import FileTask
from linrec.lab.tasks.images import N_CLASSES, SequentialSplit, white_noise
from linrec.lab.tasks.sequential_cifar import SequentialCIFAR

__all__ = ["NoisePaddedCIFAR", "NoisePaddedSplit"]

Noise: TypeAlias = Literal["fresh", "fixed"]


@dataclass(frozen=True, eq=False)
class NoisePaddedSplit:
    """Images row by row, followed by noise: a `Source`. Batches are created on the CPU.

    Attributes:
        images: the images, a row per step.
        length: number of steps, including the image.
        stream: seed of this split's noise.
        fixed: noise shared by all images, shape (steps of noise, features); None if every image has its own.
    """

    images: SequentialSplit
    length: int
    stream: tuple[int, ...]
    fixed: Float[Tensor, "n f"] | None = None

    @property
    def labels(self) -> Int64[Tensor, "n"]:
        """Class of each image."""
        return self.images.labels

    def __len__(self) -> int:
        return len(self.images)

    def rows(self, index: Int64[Tensor, "b"]) -> Batch:
        """Return images and their noise as a batch.

        Args:
            index: indices of images, shape (b), int64, on any device.

        Returns:
            Inputs, shape (b, t, f), float32; targets, shape (b), int64; `reset` None.
        """
        batch = self.images.rows(index)
        _, steps, features = batch.inputs.shape
        shape = (len(index), self.length - steps, features)
        if self.fixed is not None:
            return batch._replace(inputs=torch.cat([batch.inputs, self.fixed.expand(shape)], 1))
        noise = white_noise(self.stream, index, shape[1:])
        return batch._replace(inputs=torch.cat([batch.inputs, noise], 1))

    def of_epoch(self, *, seed: int, epoch: int) -> "NoisePaddedSplit":
        """Return the same images with new noise for this epoch, unless the noise is fixed."""
        return replace(self, stream=(*self.stream[:2], 1 + seed, epoch))

    def to(self, device: torch.device | str) -> "NoisePaddedSplit":
        """Return the split itself, because its noise is drawn on the CPU."""
        return self


@dataclass(frozen=True, kw_only=True)
class NoisePaddedCIFAR(FileTask, ClassificationTask):
    """Classify a CIFAR-10 image from its rows, followed by noise.

        target = label, given row_1, ..., row_32, e_33, ..., e_T with e ~ N(0, 1)

    A step has the 96 values of a row, three per pixel. They are normalised with mean and standard deviation
    of the training split, so that they have the scale of the noise. The last training images are held out for
    validation; the test split is the data set's own. The data depend on the fields and on the files.

    Args:
        path: the archive cifar-10-binary.tar.gz, or the unpacked folder.
        n_validation: number of training images, from the end, that are held out for validation.
        seed: seed of the noise only.
        length: number of steps, T.
        noise: "fresh": every image has its own noise, and training images have new noise in every epoch;
            "fixed": all images have the same noise, as in coRNN's code, which reveals the position to the
            model.

    Raises:
        ValueError: a field is out of range.

    Source: Chang et al. (2019), section 5. coRNN's code trains on 47,000 images, validates on 3,000, and does
    not normalise.

    Example:
        >>> task = NoisePaddedCIFAR(length=500)
        >>> task.n_features, task.n_outputs, task.chance
        (96, 10, 0.1)
    """

    n_validation: int = 5000
    seed: int = 0
    length: int = 1000
    noise: Noise = "fresh"
    vocab_size: ClassVar[int | None] = None
    n_outputs: ClassVar[int] = N_CLASSES
    n_features: ClassVar[int] = SIDE * CHANNELS
    wanted: ClassVar[str] = SequentialCIFAR.wanted

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, n_validation=1, seed=0, length=SIDE)
        if self.noise not in ("fresh", "fixed"):
            raise unknown("`noise`", self.noise, ["fresh", "fixed"])

    def read(self) -> dict[SplitName, Any]:
        """Read the files, and return all splits."""
        rows = SequentialCIFAR(path=self.path, n_validation=self.n_validation, by_row=True)
        fixed = None
        if self.noise == "fixed":
            shape = (self.length - SIDE, SIDE * CHANNELS)
            fixed = torch.from_numpy(np.random.default_rng(self.seed).standard_normal(shape, np.float32))
        return {
            name: NoisePaddedSplit(images, self.length, (self.seed, zlib.crc32(name.encode()), 0, 0), fixed)
            for name, images in rows.read().items()
        }
