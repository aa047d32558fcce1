"""Reading of the binary version of CIFAR-10, from a folder or from the downloaded archive."""

import gzip
import tarfile
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath
from typing import Literal

import numpy as np

from linrec.lab.tasks.images import N_CLASSES, Images
from linrec.text import DataError

FILES: Mapping[Literal["train", "test"], tuple[str, ...]] = {
    "train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
    "test": ("test_batch.bin",),
}
FOLDER = "cifar-10-batches-bin"
# names in the Python version, whose files are pickles
PYTHON_FOLDER, PYTHON_FILE = "cifar-10-batches-py", "data_batch_1"
WHERE = (
    "Download https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz, and pass the archive, or the unpacked "
    "folder, with --data.path."
)
# a row has the label of an image, followed by its red, green and blue values
CHANNELS, SIDE = 3, 32
ROW = 1 + CHANNELS * SIDE * SIDE


def read_cifar10(path: Path) -> dict[Literal["train", "test"], Images]:
    """Return the images of CIFAR-10 and their labels, in the order of the files.

    Args:
        path: the folder with data_batch_1.bin to data_batch_5.bin and test_batch.bin, or its parent folder;
            or the archive cifar-10-binary.tar.gz, which is not unpacked to the disk.

    Raises:
        DataError: a file is missing, damaged, or of the Python version.

    Source: Krizhevsky (2009), "Learning multiple layers of features from tiny images";
    https://www.cs.toronto.edu/~kriz/cifar.html for the file layout.
    """
    contents = _of_folder(path) if path.is_dir() else _of_archive(path)
    return {part: _images(path, {name: contents[name] for name in names}) for part, names in FILES.items()}


def _of_folder(path: Path) -> dict[str, bytes]:
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    try:
        _require(path, {file.name for file in folder.iterdir()})
        return {name: (folder / name).read_bytes() for names in FILES.values() for name in names}
    except OSError as error:
        raise DataError(f"{error.filename or path} cannot be read: {error.strerror or error}.") from error


def _of_archive(path: Path) -> dict[str, bytes]:
    wanted = {name for names in FILES.values() for name in names}
    contents: dict[str, bytes] = {}
    seen = set()
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name = PurePosixPath(member.name).name
                seen.add(name)
                file = archive.extractfile(member) if name in wanted and member.isfile() else None
                if file is not None:
                    contents[name] = file.read()
            # read to the end of the file, because gzip's checksum comes after the end of the archive
            while archive.fileobj is not None and archive.fileobj.read(2**20):
                pass
    # before OSError, because BadGzipFile is a subclass
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is not a tar archive, or it is truncated or damaged. {WHERE}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    _require(path, seen if PYTHON_FOLDER in seen or PYTHON_FILE in seen else {*contents})
    return contents


def _require(path: Path, names: Collection[str]) -> None:
    """Raise DataError if a file is missing; the message mentions the Python version if it was given."""
    missing = [name for of_part in FILES.values() for name in of_part if name not in names]
    if not missing:
        return
    if PYTHON_FOLDER in names or PYTHON_FILE in names:
        raise DataError(
            f"{path} has the Python version of CIFAR-10. Its pickles can run any code and are not read. "
            f"The binary version has the same images. {WHERE}"
        )
    raise DataError(f"{path} has no {missing[0]}, which is one of the six files of CIFAR-10. {WHERE}")


def _images(path: Path, contents: Mapping[str, bytes]) -> Images:
    for name, content in contents.items():
        if not content or len(content) % ROW:
            raise DataError(
                f"{name} of {path} must have rows of {ROW} bytes, a label and {CHANNELS} x {SIDE} x {SIDE} "
                f"pixels; it has {len(content)} bytes. It is truncated or damaged: get it again."
            )
    rows = np.frombuffer(b"".join(contents.values()), dtype=np.uint8).reshape(-1, ROW)
    labels = rows[:, 0]
    if labels.max() >= N_CLASSES:
        raise DataError(
            f"the labels of {path} must be 0 to {N_CLASSES - 1}; got {labels.max()}. The files are damaged, "
            "or of CIFAR-100."
        )
    return Images(rows[:, 1:].reshape(-1, CHANNELS, SIDE, SIDE).transpose(0, 2, 3, 1), labels)
