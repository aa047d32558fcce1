"""Tasks of CIFAR-10 and CIFAR-100, and the reading of their binary versions from a folder or an archive."""

import gzip
import tarfile
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from linrec.lab.tasks.base import Batch, SplitName
from linrec.lab.tasks.files import FileTask
from linrec.lab.tasks.images import N_CLASSES, Images, ImageTask, SequentialSplit, white_noise
from linrec.lab.tasks.labelled import ClassificationTask, LabelledTokens
from linrec.text import DataError

__all__ = ["NoisePaddedCIFAR", "NoisePaddedSplit", "SequentialCIFAR", "read_cifar"]

CHANNELS, SIDE = 3, 32
CifarClasses: TypeAlias = Literal[10, 20, 100]


class Layout(NamedTuple):
    """The files of a binary version.

    A row of a file has the labels of an image, a byte each, followed by its red, green and blue values.

    Args:
        name: name of the data set.
        files: names of the files for training and for testing.
        folder: name of the unpacked folder.
        python: names in the Python version, whose files are pickles.
        archive: name of the archive.
        labels: the number of classes of each label.
    """

    name: str
    files: Mapping[Literal["train", "test"], tuple[str, ...]]
    folder: str
    python: tuple[str, ...]
    archive: str
    labels: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all files."""
        return (*self.files["train"], *self.files["test"])

    @property
    def where(self) -> str:
        """The source of the files."""
        return (
            f"Download https://www.cs.toronto.edu/~kriz/{self.archive}, and pass the archive, or the "
            "unpacked folder, with --data.path."
        )


CIFAR10 = Layout(
    "CIFAR-10",
    {"train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)), "test": ("test_batch.bin",)},
    "cifar-10-batches-bin",
    ("cifar-10-batches-py", "data_batch_1"),
    "cifar-10-binary.tar.gz",
    (10,),
)
CIFAR100 = Layout(
    "CIFAR-100",
    {"train": ("train.bin",), "test": ("test.bin",)},
    "cifar-100-binary",
    ("cifar-100-python", "train"),
    "cifar-100-binary.tar.gz",
    (20, 100),
)
WHERE = CIFAR10.where


def read_cifar(path: Path, n_classes: CifarClasses = 10) -> dict[Literal["train", "test"], Images]:
    """Return the images of CIFAR-10 or CIFAR-100 and their labels, in the order of the files.

    Args:
        path: the folder with data_batch_1.bin to data_batch_5.bin and test_batch.bin, or for CIFAR-100 with
            train.bin and test.bin; or its parent folder; or the archive cifar-10-binary.tar.gz or
            cifar-100-binary.tar.gz, which is not unpacked to the disk.
        n_classes: 10 reads CIFAR-10; 100 and 20 read CIFAR-100 with its fine or its coarse labels.
    """
    of = CIFAR10 if n_classes == 10 else CIFAR100
    contents = _of_folder(path, of) if path.is_dir() else _of_archive(path, of)
    parts = {part: {name: contents[name] for name in names} for part, names in of.files.items()}
    return {part: _images(path, files, of, n_classes) for part, files in parts.items()}


def _of_folder(path: Path, of: Layout) -> dict[str, bytes]:
    folder = path / of.folder if (path / of.folder).is_dir() else path
    try:
        _require(path, {file.name for file in folder.iterdir()}, of)
        return {name: (folder / name).read_bytes() for name in of.names}
    except OSError as error:
        raise DataError(f"{error.filename or path} cannot be read: {error.strerror or error}.") from error


def _of_archive(path: Path, of: Layout) -> dict[str, bytes]:
    contents: dict[str, bytes] = {}
    seen = set()
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name = PurePosixPath(member.name).name
                seen.add(name)
                file = archive.extractfile(member) if name in of.names and member.isfile() else None
                if file is not None:
                    contents[name] = file.read()
            # read to the end of the file, because gzip's checksum comes after the end of the archive
            while archive.fileobj is not None and archive.fileobj.read(2**20):
                pass
    # before OSError, because BadGzipFile is a subclass
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is not a tar archive, or it is truncated or damaged. {of.where}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    _require(path, seen if seen & {*of.python} else {*contents}, of)
    return contents


def _require(path: Path, names: Collection[str], of: Layout) -> None:
    """Raise DataError if a file is missing; the message mentions the Python version if it was given."""
    missing = [name for name in of.names if name not in names]
    if not missing:
        return
    if {*of.python} & {*names}:
        raise DataError(
            f"{path} has the Python version of {of.name}. Its pickles can run any code and are not read. "
            f"The binary version has the same images. {of.where}"
        )
    raise DataError(
        f"{path} has no {missing[0]}, which is one of the {len(of.names)} files of {of.name}. {of.where}"
    )


def _images(path: Path, contents: Mapping[str, bytes], of: Layout, n_classes: int) -> Images:
    n_bytes = len(of.labels) + CHANNELS * SIDE * SIDE
    for name, content in contents.items():
        if not content or len(content) % n_bytes:
            raise DataError(
                f"{name} of {path} must have rows of {n_bytes} bytes, {len(of.labels)} labels and "
                f"{CHANNELS} x {SIDE} x {SIDE} pixels; it has {len(content)} bytes. It is "
                "truncated or damaged: get it again."
            )
    rows = np.frombuffer(b"".join(contents.values()), dtype=np.uint8).reshape(-1, n_bytes)
    labels = rows[:, of.labels.index(n_classes)]
    if labels.max() >= n_classes:
        raise DataError(
            f"the labels of {path} must be 0 to {n_classes - 1}; got {labels.max()}. The files are damaged, "
            "or of another data set."
        )
    return Images(rows[:, len(of.labels) :].reshape(-1, CHANNELS, SIDE, SIDE).transpose(0, 2, 3, 1), labels)


# weights of red, green and blue as 16-bit fixed point numbers: 0.299, 0.587 and 0.114, from ITU-R 601
LUMA = np.array([19595, 38470, 7471], np.uint32)


@dataclass(frozen=True, kw_only=True)
class SequentialCIFAR(ImageTask):
    """Classify an image of CIFAR-10 or CIFAR-100 that is read pixel by pixel.

        target = label, given x_1, ..., x_1024 with x_i = (red, green, blue), or grey

    An image of 32 x 32 pixels is a sequence of 1,024 steps, row by row. Grey is 0.299 red + 0.587 green +
    0.114 blue, rounded to a byte.

    Args:
        path: the archive cifar-10-binary.tar.gz or cifar-100-binary.tar.gz, or the unpacked folder.
        n_classes: 10 reads CIFAR-10; 100 and 20 read CIFAR-100, with its classes or its groups of classes.
        by_row: whether a step is a row of 32 pixels instead of a pixel.
        grey: whether to convert images to grey.
        tokens: whether grey pixels are tokens 0 to 255 instead of real numbers.

    Source: Long Range Arena (Tay et al., 2020, arXiv:2011.04006), section 2.2.4, the Image task, for grey
    images and for 45,000 training and 5,000 validation images. The Arena uses tokens, S4 (Gu, Goel and Ré,
    2022) real numbers.

    Example:
        >>> SequentialCIFAR().n_features
        3
        >>> SequentialCIFAR(grey=True, tokens=True).vocab_size
        256
    """

    n_classes: CifarClasses = 10
    grey: bool = False
    tokens: bool = False
    wanted: ClassVar[str] = (
        f"It must be the binary version of CIFAR-10. {WHERE} CIFAR-100 is in {CIFAR100.archive}, and needs "
        "--data.n-classes 100."
    )
    n_columns: ClassVar[int] = SIDE

    def check(self) -> None:
        """Require a number of classes, and tokens or noise."""
        super().check()
        if self.n_classes not in (10, 20, 100):
            raise ValueError(f"`n_classes` must be 10, 20 or 100; got {self.n_classes}.")
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
    def n_outputs(self) -> int:
        """Number of target classes."""
        return self.n_classes

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
        """Return the training and the test images; see `read_cifar` for errors."""
        parts = read_cifar(self.existing(), self.n_classes)
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
        """Return images and their noise as a batch: inputs (b, t, f), float32; and targets (b), int64."""
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
    """Classify a CIFAR-10 image from its rows, followed by noise for nearly a thousand steps.

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

    Source: Chang, Chen, Haber and Chi (2019, arXiv:1902.09689), section 5; coRNN (Rusch and Mishra, 2021,
    arXiv:2010.00951) has the same setting with 96 features and 1,000 steps. coRNN's code trains on 47,000
    images, validates on 3,000, and does not normalise.

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
    least: ClassVar[Mapping[str, int]] = {"n_validation": 1, "seed": 0, "length": SIDE}

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
