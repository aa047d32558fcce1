"""Classification of photographs in folders, such as ImageNet-1k and Mini-ImageNet."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from linrec.extras import import_extra
from linrec.lab.tasks.base import Batch, SplitName
from linrec.lab.tasks.files import FileTask
from linrec.lab.tasks.labelled import ClassificationTask, stratified
from linrec.text import DataError

__all__ = ["ImageFolders", "PhotoSplit"]

SUFFIXES = (".jpeg", ".jpg", ".png", ".bmp", ".webp")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of red, green and blue in ImageNet, in units of the range from black to white."""
CROP = 0.875
"""Side of the central crop in units of the shorter side."""
SHARES = (0.8, 0.1, 0.1)
AREA, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
"""Ranges of area and ratio of sides of a random crop."""


@dataclass(frozen=True, eq=False)
class PhotoSplit:
    """Photographs in files, read when a batch needs them: a `Source`.

    Attributes:
        paths: the files.
        labels: class of each photograph, shape (n), int64.
        size: height and width of the images.
        epoch: seed and number of a training epoch, which has random crops and flips; None for central crops.
    """

    paths: Sequence[Path]
    labels: Int64[Tensor, "n"]
    size: int
    epoch: tuple[int, int] | None = None

    def __len__(self) -> int:
        return len(self.paths)

    def rows(self, index: Int64[Tensor, "b"]) -> Batch:
        """Return images as a batch on the CPU: inputs (b, 3, size, size), float32; and targets (b), int64."""
        with ThreadPoolExecutor() as pool:
            images = torch.stack([*pool.map(self._image, index.tolist())])
        mean, std = (torch.tensor(number)[:, None, None] for number in (MEAN, STD))
        return Batch((images - mean) / std, self.labels[index.cpu()], None)

    def of_epoch(self, *, seed: int, epoch: int) -> "PhotoSplit":
        """Return the photographs with the random crops and flips of an epoch."""
        return dataclasses.replace(self, epoch=(seed, epoch))

    def to(self, device: torch.device | str) -> "PhotoSplit":
        """Return the split itself, because its files are read on the CPU."""
        return self

    def _image(self, number: int) -> Float[Tensor, "3 size size"]:
        pillow = import_extra("PIL.Image", "reading photographs")
        path = self.paths[number]
        try:
            with pillow.open(path) as file:
                image = file.convert("RGB")
        except OSError as error:
            raise DataError(
                f"{path} cannot be read as an image: {error}. Get it again, or remove it."
            ) from error
        width, height = image.size
        flip = False
        if self.epoch is None:
            side = CROP * min(width, height)
            box = ((width - side) / 2, (height - side) / 2, (width + side) / 2, (height + side) / 2)
        else:
            random = np.random.default_rng([*self.epoch, number])
            box, flip = _random_box(width, height, random), random.random() < 0.5
        resized = image.resize((self.size, self.size), pillow.Resampling.BICUBIC, box=box)
        pixels = torch.from_numpy(np.array(resized)).movedim(-1, 0).float() / 255
        return pixels.flip(-1) if flip else pixels


def _random_box(width: int, height: int, random: np.random.Generator) -> tuple[float, float, float, float]:
    """Return a crop of random area and ratio; the largest central square if ten draws do not fit."""
    for _ in range(10):
        area = width * height * random.uniform(*AREA)
        ratio = math.exp(random.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        w, h = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if w <= width and h <= height:
            left, top = random.uniform(0, width - w), random.uniform(0, height - h)
            return left, top, left + w, top + h
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


@dataclass(frozen=True, kw_only=True)
class ImageFolders(FileTask, ClassificationTask):
    """Classify photographs, with a folder of files per class; trains an `ImageClassifier`.

    The folder has train/CLASS/... and val/CLASS/..., as the unpacked ImageNet-1k with its 1,281,167 and
    50,000 photographs sorted into 1,000 folders. The files of val are the test split, as
    in the literature; of each class, the last `n_validation` files of train validate. Or the folder has the
    classes themselves, as Mini-ImageNet with 100 classes of 600 photographs: then 80% of each class train,
    10% validate and 10% test, at random.

    Training images are random crops of 8% to 100% of the area, at ratios of 3/4 to 4/3, and half of them are
    flipped; other images are central crops. Both are resized to `size` and normalised with ImageNet's mean
    and standard deviation. They depend on the seed of the run, the epoch and the image alone.

    Args:
        path: the folder.
        size: height and width of the images, a multiple of the model's `patch_size`.
        n_validation: number of training photographs of each class that are held out for validation.
        seed: seed of the splits of a folder of classes.
        n_classes: number of classes; None reads it from the folder.

    Source: Russakovsky and others (2015, arXiv:1409.0575) for ImageNet-1k; Vinyals and others (2016,
    arXiv:1606.04080) for Mini-ImageNet; DeiT (Touvron and others, 2021, arXiv:2012.12877) for crops. DeiT's
    further augmentation (RandAugment, mixup, CutMix, erasing) and label smoothing are left out.

    Example:
        >>> ImageFolders(n_classes=100).n_outputs
        100
    """

    size: int = 224
    n_validation: int = 10
    seed: int = 0
    n_classes: int | None = None
    whole_images: ClassVar[bool] = True
    least: ClassVar[Mapping[str, int]] = {"size": 1, "n_validation": 1, "seed": 0}
    vocab_size: ClassVar[int | None] = None
    wanted: ClassVar[str] = (
        "Get ImageNet-1k at https://image-net.org/download.php, sort its photographs into train/CLASS and "
        "val/CLASS, and pass the folder with --data.path. Any folder with a folder per class is read too."
    )

    @property
    def n_outputs(self) -> int:
        """Number of target classes; 1 before `prepared`, unless `n_classes` is given."""
        return self.n_classes or 1

    def sizes(self) -> dict[str, int]:
        """List the files, and return the number of classes."""
        return {"n_classes": 1 + int(self.split("train").labels.max())}

    def read(self) -> dict[SplitName, PhotoSplit]:
        """List the files, and return all splits."""
        folder = self.folder()
        if (folder / "train").is_dir():
            known = self._listed(folder / "train")
            test = self._listed(folder / "val")
            if test.keys() != known.keys():
                odd = min(test.keys() ^ known.keys())
                raise DataError(f"{folder} must have the same classes in train and val; one lacks {odd!r}.")
            parts = [
                {name: files[: -self.n_validation] for name, files in known.items()},
                {name: files[-self.n_validation :] for name, files in known.items()},
                test,
            ]
        else:
            known = self._listed(folder)
            labels = np.repeat(np.arange(len(known)), [*map(len, known.values())])
            files = [file for of_class in known.values() for file in of_class]
            places = stratified(labels, SHARES, np.random.default_rng(self.seed))
            chosen = [{files[place] for place in part} for part in places]
            parts = [{n: [f for f in fs if f in part] for n, fs in known.items()} for part in chosen]
        names: tuple[SplitName, ...] = ("train", "validation", "test")
        return {name: self._split(part, name) for name, part in zip(names, parts, strict=True)}

    def _split(self, files: dict[str, list[Path]], name: str) -> PhotoSplit:
        if empty := [of_class for of_class, paths in files.items() if not paths]:
            raise DataError(
                f"the class {empty[0]!r} of {self.path} has too few photographs for the split {name!r}."
            )
        labels = torch.tensor([label for label, paths in enumerate(files.values()) for _ in paths])
        return PhotoSplit([path for paths in files.values() for path in paths], labels, self.size)

    def _listed(self, folder: Path) -> dict[str, list[Path]]:
        """Return the files of each class, sorted."""
        try:
            classes = sorted(path for path in folder.iterdir() if path.is_dir())
            found = {
                path.name: sorted(f for f in path.iterdir() if f.suffix.lower() in SUFFIXES)
                for path in classes
            }
        except OSError as error:
            raise DataError(
                f"{error.filename} cannot be read: {error.strerror or error}. {self.wanted}"
            ) from error
        if len(found) < 2:
            raise DataError(
                f"{folder} must have a folder for each of at least 2 classes; it has {len(found)}. "
                f"{self.wanted}"
            )
        return found

    def score(self, predictions: Int64[Tensor, "n"], split: Any) -> dict[str, Any]:
        """Return the accuracy of predictions on a split; see `ClassificationTask.score`."""
        return ClassificationTask.score(self if self.n_classes else self.prepared(), predictions, split)
