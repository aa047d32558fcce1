"""Files of CIFAR-10 in the layout of its binary version, of a few images."""

import io
import tarfile

import numpy as np
import pytest

N_TEST, PER_FILE = 6, 4
NAMES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")


def draw(n, seed):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, 3, 32, 32), dtype=np.uint8), rng.integers(0, 10, n, dtype=np.uint8)


TRAIN, TEST = draw(5 * PER_FILE, 1), draw(N_TEST, 2)


def rows(images, labels):
    """A label, then the red, the green and the blue plane, image after image."""
    return b"".join(bytes([label]) + image.tobytes() for image, label in zip(images, labels, strict=True))


def write(folder):
    folder.mkdir()
    for number, name in enumerate(NAMES[:5]):
        part = slice(number * PER_FILE, (number + 1) * PER_FILE)
        (folder / name).write_bytes(rows(TRAIN[0][part], TRAIN[1][part]))
    (folder / NAMES[5]).write_bytes(rows(*TEST))
    (folder / "batches.meta.txt").write_text("airplane\n")


def pack(path, folder, name="cifar-10-batches-bin"):
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, arcname=name)
    return path


def pack_empty(path, *names):
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    return path


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "cifar-10-batches-bin")
    return tmp_path / "cifar-10-batches-bin"


def write_cifar100(folder):
    """The files of CIFAR-100: a coarse and a fine label before each image."""
    folder.mkdir()
    for name, (images, labels) in (("train.bin", TRAIN), ("test.bin", TEST)):
        lines = zip(images, labels, strict=True)
        (folder / name).write_bytes(b"".join(bytes([n, 90 + n]) + image.tobytes() for image, n in lines))
    return folder
