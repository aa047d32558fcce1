"""Sequential images: classify an image of MNIST or Fashion-MNIST that is read pixel by pixel.

An image of 28 x 28 pixels is a sequence of 784 steps, row by row, with a number per step. In the permuted
task, the pixels of all images are permuted with the same permutation, which destroys local structure.

Source: Le, Jaitly and Hinton (2015), arXiv:1504.00941, section 4.2, for both tasks. The data: MNIST (LeCun,
Bottou, Bengio and Haffner, 1998) and Fashion-MNIST (Xiao, Rasul and Vollgraf, 2017), of the same shape.
"""

import gzip
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from linrec.lab.tasks.images import N_CLASSES, Images, ImageTask
from linrec.text import DataError

__all__ = ["SequentialImages"]

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
    train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte, t10k-labels-idx1-ubyte. The last
    training images are held out for validation; the test split is the data set's own. The data depend on the
    fields and on the files.

    Args:
        path: the folder of the files.
        permuted: whether the pixels of all images are permuted with the same permutation.
        permutation: the permutation: "random" depends on `seed`; "bit-reversal" sorts pixels by their index
            with its bits reversed.
        by_row: whether a step is a row of 28 pixels instead of a pixel.
        n_validation: number of training images, from the end, that are held out for validation.
        seed: seed of the random permutation and of the noise.
        test_noise: standard deviations of white noise on the test images, in units of the pixels' range from
            black to white; see `probes`.
        test_salt_and_pepper: shares of the pixels of the test images that become black or white; see
            `probes`.

    Raises:
        ValueError: a field is out of range.

    Source: Le, Jaitly and Hinton (2015), section 4.2; S4's code (Gu, Goel and Ré, 2022) for bit reversal;
    Lim et al. (2021), arXiv:2102.04877, section 7, for tests with noise.

    Example:
        >>> task = SequentialImages(path=Path("fashion-mnist"), permuted=True)
        >>> task.n_features, task.n_outputs, task.chance
        (1, 10, 0.1)
    """

    wanted: ClassVar[str] = f"It must be a folder with the four files of MNIST or Fashion-MNIST. {WHERE}"
    n_columns: ClassVar[int] = 28

    def images(self) -> dict[Literal["train", "test"], Images]:
        """Return the training and the test images.

        Raises:
            DataError: a file is missing, damaged, or of the wrong kind.
        """
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
