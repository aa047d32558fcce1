"""Sequential CIFAR-10: classify an image that is read pixel by pixel, in colour or in grey.

An image of 32 x 32 pixels is a sequence of 1,024 steps, row by row. A step has three numbers in colour and a
single number in grey. In grey, this is the Image task of the Long Range Arena (Tay et al., 2020,
arXiv:2011.04006, section 2.2.4).
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from jaxtyping import UInt8

from linrec.lab.tasks.base import SplitName
from linrec.lab.tasks.cifar_files import CHANNELS, SIDE, WHERE, read_cifar10
from linrec.lab.tasks.images import Images, ImageTask
from linrec.lab.tasks.labelled import LabelledTokens

__all__ = ["SequentialCIFAR"]

# weights of red, green and blue as 16-bit fixed point numbers: 0.299, 0.587 and 0.114, from ITU-R 601
LUMA = np.array([19595, 38470, 7471], np.uint32)


@dataclass(frozen=True, kw_only=True)
class SequentialCIFAR(ImageTask):
    """Classify a CIFAR-10 image that is read pixel by pixel.

        target = label, given x_1, ..., x_1024 with x_i = (red, green, blue), or grey

    Grey is 0.299 red + 0.587 green + 0.114 blue, rounded to a byte. The last training images are held out for
    validation; the test split is the data set's own. Each channel is normalised with mean and standard
    deviation of the training split. The data depend on the fields and on the files.

    Args:
        path: the archive cifar-10-binary.tar.gz, or the unpacked folder.
        permuted: whether the pixels of all images are permuted with the same permutation.
        permutation: the permutation: "random" depends on `seed`; "bit-reversal" sorts pixels by their index
            with its bits reversed.
        by_row: whether a step is a row of 32 pixels instead of a pixel.
        n_validation: number of training images, from the end, that are held out for validation.
        seed: seed of the random permutation and of the noise.
        test_noise: standard deviations of white noise on the test images, in units of the pixels' range from
            black to white; see `probes`.
        test_salt_and_pepper: shares of the pixels of the test images that become black or white; see
            `probes`.
        grey: whether to convert images to grey.
        tokens: whether grey pixels are tokens 0 to 255 instead of real numbers.

    Raises:
        ValueError: a field is out of range, or `tokens` is combined with colour, `by_row` or noise.

    Source: Long Range Arena (Tay et al., 2020), section 2.2.4, for grey images and for 45,000 training and
    5,000 validation images. The Arena uses tokens, S4 (Gu, Goel and Ré, 2022) real numbers.

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
                f"`tokens` needs `grey` = True and `by_row` = False; got `grey` = {self.grey} and `by_row` = "
                f"{self.by_row}. Pass `grey` without `by_row`, or leave `tokens` out."
            )
        if self.tokens and (self.test_noise or self.test_salt_and_pepper):
            raise ValueError(
                "`test_noise` and `test_salt_and_pepper` need `tokens` = False; got `tokens` = True with "
                f"{self.test_noise} and {self.test_salt_and_pepper}. Leave `tokens` out for real numbers."
            )

    @property
    def n_channels(self) -> int:
        """Number of channels of a pixel: 3, or 1 in grey."""
        return 1 if self.grey else CHANNELS

    @property
    def n_features(self) -> int | None:
        """Number of input features per step; None for tokens."""
        return None if self.tokens else super().n_features

    @property
    def vocab_size(self) -> int | None:
        """Vocabulary size: 256, or None for real-valued pixels."""
        return 256 if self.tokens else None

    def images(self) -> dict[Literal["train", "test"], Images]:
        """Return the training and the test images; see `read_cifar10` for errors."""
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
    # in parts, because the products take four times the memory of the images
    parts = [(part @ LUMA + 2**15 >> 16).astype(np.uint8) for part in np.array_split(pixels, 50)]
    return np.concatenate(parts)[..., None]
