"""Sequential CIFAR-10: say what a photograph shows after reading it pixel by pixel, in colour or in grey.

An image of 32 x 32 is a sequence of 1,024 steps, row after row: three numbers each in colour, one in grey,
which is the Image task of the Long Range Arena (Tay et al., 2020, arXiv:2011.04006, section 2.2.4).
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from jaxtyping import UInt8

from linrec.tasks.base import SplitName
from linrec.tasks.cifar_files import CHANNELS, SIDE, WHERE, read_cifar10
from linrec.tasks.images import Images, ImageTask
from linrec.tasks.labelled import LabelledTokens

__all__ = ["SequentialCIFAR"]

# weights of red, green and blue in sixteen bits: 0.299, 0.587 and 0.114, of ITU-R 601
LUMA = np.array([19595, 38470, 7471], np.uint32)


@dataclass(frozen=True, kw_only=True)
class SequentialCIFAR(ImageTask):
    """The class of a photograph of CIFAR-10 that is read pixel by pixel.

        target = label      after x_1, ..., x_1024      x_i = (red, green, blue), or grey

    Grey is 0.299 red + 0.587 green + 0.114 blue, rounded to a byte. The last training images validate, and
    the test split is the data set's own. Each channel is normalised with mean and standard deviation of the
    training split. The data depends on the fields and on the files.

    Args:
        path: the archive cifar-10-binary.tar.gz, or the folder that it unpacks to.
        permuted: whether the pixels of all images come in another order than row after row.
        permutation: which order that is: "random", of `seed`; or "bit-reversal", by the numbers that result
            when the bits of a pixel's own number are read backwards.
        by_row: whether a step has 32 pixels, and not one.
        n_validation: how many of the training images, the last ones, validate.
        seed: seed of the random order alone.
        grey: whether pixels are grey.
        tokens: whether grey pixels are tokens 0 to 255 rather than real numbers.

    Raises:
        ValueError: a field is out of range, or tokens are asked for that are no single grey pixels.

    Source: Long Range Arena (Tay et al., 2020), section 2.2.4, of which grey and the 45,000 and 5,000
    images are; it takes tokens, S4 (Gu, Goel and Ré, 2022) real numbers.

    Example:
        >>> SequentialCIFAR().n_features
        3
        >>> SequentialCIFAR(grey=True, tokens=True).vocab_size
        256
    """

    grey: bool = False
    tokens: bool = False
    wanted: ClassVar[str] = f"It must be the binary version of CIFAR-10. {WHERE}"
    n_columns: ClassVar[int] = SIDE

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens and (self.by_row or not self.grey):
            raise ValueError(
                f"`tokens` are single grey pixels; got `grey` = {self.grey} and `by_row` = {self.by_row}. "
                "Pass `grey` without `by_row`, or leave `tokens` out."
            )

    @property
    def n_channels(self) -> int:
        """Numbers of a pixel: 3, or 1 in grey."""
        return 1 if self.grey else CHANNELS

    @property
    def n_features(self) -> int | None:
        """Real numbers per step; None where steps are tokens."""
        return None if self.tokens else super().n_features

    @property
    def vocab_size(self) -> int | None:
        """Number of input tokens: 256, or None where pixels are real numbers."""
        return 256 if self.tokens else None

    def images(self) -> dict[Literal["train", "test"], Images]:
        """Read the files; errors are those of `read_cifar10`."""
        parts = read_cifar10(self.existing())
        if self.grey:
            return {part: Images(_grey(images.pixels), images.labels) for part, images in parts.items()}
        return parts

    def read(self) -> dict[SplitName, Any]:
        """Read the files, and return all splits."""
        splits = super().read()
        if not self.tokens:
            return splits
        return {name: LabelledTokens(split.pixels[..., 0], split.labels) for name, split in splits.items()}


def _grey(
    pixels: UInt8[np.ndarray, "n rows columns 3"],
) -> UInt8[np.ndarray, "n rows columns 1"]:
    # some at a time, for the products are four times as large
    parts = [(part @ LUMA + 2**15 >> 16).astype(np.uint8) for part in np.array_split(pixels, 50)]
    return np.concatenate(parts)[..., None]
