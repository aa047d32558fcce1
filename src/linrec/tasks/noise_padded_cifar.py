"""Noise-padded CIFAR-10: say what a photograph shows long after it was read, row by row.

The 32 rows of an image are followed by noise, so that what the image shows has to be kept over nearly a
thousand steps.

Source: Chang, Chen, Haber and Chi (2019), arXiv:1902.09689, section 5; the setting with 96 numbers and 1,000
steps is also that of coRNN (Rusch and Mishra, 2021), arXiv:2010.00951.
"""

import zlib
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from linrec.errors import unknown
from linrec.tasks.base import Batch, SplitName, require_at_least
from linrec.tasks.cifar_files import CHANNELS, SIDE
from linrec.tasks.classification import ClassificationTask
from linrec.tasks.files import FileTask
from linrec.tasks.images import N_CLASSES, SequentialSplit
from linrec.tasks.sequential_cifar import SequentialCIFAR

__all__ = ["NoisePaddedCIFAR", "NoisePaddedSplit"]

Noise: TypeAlias = Literal["fresh", "fixed"]


@dataclass(frozen=True, eq=False)
class NoisePaddedSplit:
    """Images row by row, and noise after them: a `Source`. Batches are made on the CPU.

    Attributes:
        images: the images, a row a step.
        length: steps, those of the image included.
        stream: what tells the noise of this split from that of others.
        fixed: noise that all images have, shape (steps of noise, features); None where each has its own.
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
            index: numbers of images, shape (b), int64, on any device.

        Returns:
            Inputs, shape (b, t, f), float32; targets, shape (b), int64; no `reset`.
        """
        batch = self.images.rows(index)
        _, steps, features = batch.inputs.shape
        shape = (len(index), self.length - steps, features)
        if self.fixed is not None:
            return batch._replace(inputs=torch.cat([batch.inputs, self.fixed.expand(shape)], 1))
        noise = np.empty(shape, np.float32)
        for place, number in enumerate(index.tolist()):
            np.random.default_rng([*self.stream, number]).standard_normal(dtype=np.float32, out=noise[place])
        return batch._replace(inputs=torch.cat([batch.inputs, torch.from_numpy(noise)], 1))

    def of_epoch(self, *, seed: int, epoch: int) -> "NoisePaddedSplit":
        """Return the same images with other noise, of this epoch alone, unless the noise is fixed."""
        return replace(self, stream=(*self.stream[:2], 1 + seed, epoch))

    def to(self, device: torch.device | str) -> "NoisePaddedSplit":
        """Return the split itself: its noise is drawn on the CPU."""
        return self


@dataclass(frozen=True, kw_only=True)
class NoisePaddedCIFAR(FileTask, ClassificationTask):
    """The class of a photograph of CIFAR-10 whose rows come first, and noise after them.

        target = label      after row_1, ..., row_32, e_33, ..., e_T      e ~ N(0, 1)

    A step has the 96 numbers of a row, three for each pixel, normalised with mean and standard deviation of
    the training split, so that noise is as large as they are. The last training images validate, and the test
    split is the data set's own. The data depends on the fields and on the files.

    Args:
        path: the archive cifar-10-binary.tar.gz, or the folder that it unpacks to.
        n_validation: how many of the training images, the last ones, validate.
        seed: seed of the noise alone.
        length: steps, T.
        noise: "fresh", every image has noise of its own, in training another one in every epoch; or "fixed",
            all images have the same, as in coRNN's code, where it tells a model where it is.

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
