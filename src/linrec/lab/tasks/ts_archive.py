"""Base class of tasks that read a data set of the archives of time series, a pair of .ts files."""

import dataclasses
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from linrec.errors import unknown
from linrec.lab.tasks.base import SplitName, require_at_least
from linrec.lab.tasks.files import FileTask
from linrec.lab.tasks.labelled_series import LabelledSeries, stratified
from linrec.lab.tasks.ts_files import TsFile, read_ts
from linrec.text import DataError

POOLED = (0.7, 0.85)
"""Cumulative fractions of the pooled splits: 70% for training, 15% for validation, 15% for testing."""
VARIANTS = ("_eq", "_nmv", "_eq_nmv")
"""Suffixes of alternative versions of a data set: with equal lengths, or without missing values."""

AnyArchive = TypeVar("AnyArchive", bound="TsArchive")


@dataclass(frozen=True, kw_only=True)
class TsArchive(FileTask):
    """Base class of tasks that read a data set of the archives; a subclass sets the kind of labels.

    The folder contains NAME_TRAIN.ts and NAME_TEST.ts. Alternative versions in the same folder, NAME_eq with
    equal lengths and NAME_nmv without missing values, are ignored. A series that occurs twice is used once,
    so that splits have no series in common. Each dimension is normalised with mean and standard deviation of
    the training split. Series may have different lengths; they are padded to the longest series, and batches
    contain the lengths. Missing values are replaced by the mean.

    Args:
        path: the folder.
        splits: "archive": the whole test file is the test split, and a fraction of the training file, equal
            for every class, is held out for validation; "pooled": of all series, a random 70% are for
            training, 15% for validation and 15% for testing.
        validation_share: fraction of the training file that is held out for validation, with "archive".
        seed: seed of the random splits.
        n_dimensions: number of features per step; None reads it from the files.

    Raises:
        ValueError: a field is out of range.
    """

    splits: Literal["archive", "pooled"] = "archive"
    validation_share: float = 0.15
    seed: int = 0
    n_dimensions: int | None = None
    vocab_size: ClassVar[int | None] = None
    numbers: ClassVar[bool]
    """Whether the labels are real numbers; if not, they are classes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.splits not in ("archive", "pooled"):
            raise unknown("`splits`", self.splits, ["archive", "pooled"])
        if not 0 < self.validation_share < 1:
            raise ValueError(f"`validation_share` must be between 0 and 1; got {self.validation_share}.")
        require_at_least(self, seed=0)

    @property
    def n_features(self) -> int | None:
        """Number of input features per step; None before `prepared`, unless `n_dimensions` is given."""
        return self.n_dimensions

    def sizes(self) -> dict[str, int]:
        """Return the values of fields that are in the files."""
        return {"n_dimensions": self.content[1]["train"].values.shape[-1]}

    def prepared(self: AnyArchive) -> AnyArchive:
        """Read the files, and return the task with all fields set whose values are in the files.

        Raises:
            DataError: a file is missing, damaged, or of the wrong kind.
            ValueError: the files have another number of dimensions or classes than the task.
        """
        sizes: dict[str, Any] = self.sizes()
        for name, number in sizes.items():
            if getattr(self, name) not in (None, number):
                raise ValueError(
                    f"`{name}` must be {number}, as in {self.path}; got {getattr(self, name)}. Leave it out."
                )
        task = dataclasses.replace(self, **sizes)
        # keep the content, so that the files are not read again
        task.__dict__["content"] = self.content
        return task

    def read(self) -> dict[SplitName, LabelledSeries]:
        """Read the files, and return all splits.

        Raises:
            DataError: a file is missing, damaged, or of the wrong kind.
        """
        return self.content[1]

    @cached_property
    def content(self) -> tuple[tuple[str, ...], dict[SplitName, LabelledSeries]]:
        """The names of the classes, none if labels are numbers, and all splits."""
        train, test = self._files()
        series, labels = train.series + test.series, np.concatenate([train.labels, test.labels])
        # every class has the same share of a split; numbers are a single class
        classes = np.zeros(len(labels), np.int64) if self.numbers else labels
        parts = self._parts(series, classes, n_train=len(train.series))
        for name, places in parts.items():
            if not len(places):
                raise DataError(
                    f"{self.path} has {len(series)} series, too few for the split {name!r}. Pass another "
                    "`validation_share`, or `splits`."
                )
        targets = torch.from_numpy(labels).float()[:, None] if self.numbers else torch.from_numpy(labels)
        mean, std = _statistics([series[place] for place in parts["train"]])
        # pad to the longest series of all splits, so that batches always have the same shape
        longest, equal = max(map(len, series)), len(set(map(len, series))) == 1

        def part(places: NDArray[np.int64]) -> LabelledSeries:
            values = torch.zeros(len(places), longest, series[0].shape[1])
            for row, place in zip(values.numpy(), places, strict=True):
                row[: len(series[place])] = series[place]
            lengths = None if equal else torch.tensor([len(series[place]) for place in places])
            return LabelledSeries(values, targets[places], mean, std, lengths)

        return train.classes, {name: part(places) for name, places in parts.items()}

    def _files(self) -> tuple[TsFile, TsFile]:
        folder = self.folder()
        found = {path.name.removesuffix("_TRAIN.ts") for path in folder.glob("*_TRAIN.ts")}
        # ignore alternative versions of a data set
        names = sorted(found - {name + variant for name in found for variant in VARIANTS})
        if len(names) != 1 or not (folder / f"{names[0]}_TEST.ts").exists():
            raise DataError(
                f"{folder} must contain NAME_TRAIN.ts and NAME_TEST.ts of a single data set; it has "
                f"{', '.join(sorted(path.name for path in folder.glob('*.ts'))) or 'none'}. {self.wanted}"
            )
        train, test = (
            read_ts(folder / f"{names[0]}_{part}.ts", numbers=self.numbers) for part in ("TRAIN", "TEST")
        )
        for what, one, other in (
            ("classes", train.classes, test.classes),
            ("dimensions", train.series[0].shape[1], test.series[0].shape[1]),
        ):
            if one != other:
                raise DataError(
                    f"the files of {folder} must have the same {what}; the training file has {one}, the test "
                    f"file {other}. They are of different data sets."
                )
        return train, test

    def _parts(
        self, series: list[NDArray[np.float32]], labels: NDArray[np.int64], *, n_train: int
    ) -> dict[SplitName, NDArray[np.int64]]:
        """Return the indices of the series in each split."""
        random = np.random.default_rng(self.seed)
        if self.splits == "pooled":
            drawn = random.permutation(_first_ones(series, range(len(series))))
            train, validation, test = np.split(drawn, [int(share * len(drawn)) for share in POOLED])
            return {"train": train, "validation": validation, "test": test}
        # test series must not occur in the training and validation splits
        tested = range(n_train, len(series))
        first = _first_ones(series, [*tested, *range(n_train)])
        rest = np.array([place for place in first if place < n_train], dtype=np.int64)
        shares = (1 - self.validation_share, self.validation_share)
        train, validation = (rest[part] for part in stratified(labels[rest], shares, random))
        return {"train": train, "validation": validation, "test": np.array(tested)}


def _first_ones(series: list[NDArray[np.float32]], order: Iterable[int]) -> list[int]:
    """Return the indices of series in the given order, without repeated series."""
    seen: dict[bytes, int] = {}
    for place in order:
        seen.setdefault(hashlib.sha256(series[place].tobytes()).digest(), place)
    return list(seen.values())


def _statistics(series: list[NDArray[np.float32]]) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each dimension, shape (1, f), ignoring missing values."""
    found = [one.astype(np.float64) for one in series]
    count = np.maximum(sum((~np.isnan(one)).sum(0) for one in found), 1)
    mean = sum(np.nansum(one, axis=0) for one in found) / count
    square = sum(np.nansum((one - mean) ** 2, axis=0) for one in found) / count
    # a constant dimension is 0 after subtracting its mean, so its standard deviation must not be 0
    std = np.where(square > 0, np.sqrt(square), 1.0)
    return torch.from_numpy(mean).float()[None], torch.from_numpy(std).float()[None]
