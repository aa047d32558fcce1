"""UEA: the class of a time series of several dimensions, of any data set of the UEA and UCR archives.

Source: Bagnall and others (2018), arXiv:1811.00075, for the archive, of which EigenWorms has 259 series of
17,984 steps. Walker and others (2024), arXiv:2402.18512, put both files together and cut them anew.
"""

import dataclasses
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Int64
from numpy.typing import NDArray
from torch import Tensor

from linrec.errors import unknown
from linrec.tasks.base import SplitName, require_at_least, scores_by_class
from linrec.tasks.classification import ClassificationTask, LabelledSource
from linrec.tasks.files import FileTask
from linrec.tasks.labelled_series import LabelledSeries, stratified
from linrec.tasks.ts_files import TsFile, read_ts
from linrec.text import DataError

__all__ = ["Uea"]

POOLED = (0.7, 0.85)
"""Where all series are cut, of which the first part trains and the second validates."""
VARIANTS = ("_eq", "_nmv", "_eq_nmv")
"""What names of further versions end in: cut to one length, or with numbers in place of missing values."""


@dataclass(frozen=True, kw_only=True)
class Uea(FileTask, ClassificationTask):
    """The class of a time series, and the configuration that says of which data set.

        target = class      after x_1, ..., x_t, each of f numbers

    The folder has NAME_TRAIN.ts and NAME_TEST.ts. Versions of the same data, NAME_eq of one length and
    NAME_nmv without missing values, are not read where it has NAME. A series that is there twice is taken
    once, so that splits share none. Each dimension is normalised with mean and standard deviation of the
    training split. Series may have lengths of their own; all are padded to the longest one, and the batch
    tells their lengths. A value that is missing is the mean.

    Args:
        path: the folder.
        splits: "archive": the test file tests, all of it, and some of the rest validate, the same share of
            every class; "pooled": of all series, 70% chosen at random train, 15% validate and 15% test.
        validation_share: the share of the training file that validates, with splits of the archive.
        seed: seed of what is chosen.
        n_dimensions: numbers of a step; None is what the files say.
        n_classes: number of classes; likewise.

    Raises:
        ValueError: a field is out of range.

    Source: Walker and others (2024) for pooled splits, without exact duplicates; they have five seeds, whose
    choices are not those of the same seeds here.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> folder = Path(tempfile.mkdtemp())
        >>> series = "1,2:0,1:a\\n2,3:1,0:a\\n5,6:0,0:b\\n6,7:1,1:b\\n"
        >>> for part in ("TRAIN", "TEST"):
        ...     _ = (folder / f"Tiny_{part}.ts").write_text(f"@classLabel true a b\\n@data\\n{series}")
        ...     series = "9,9:8,8:a\\n"
        >>> task = Uea(path=folder, validation_share=0.5).prepared()
        >>> task.n_features, task.n_outputs, len(task.split("validation"))
        (2, 2, 2)
    """

    splits: Literal["archive", "pooled"] = "archive"
    validation_share: float = 0.15
    seed: int = 0
    n_dimensions: int | None = None
    n_classes: int | None = None
    vocab_size: ClassVar[int | None] = None
    wanted: ClassVar[str] = (
        "Get a data set of https://timeseriesclassification.com, such as "
        "https://timeseriesclassification.com/aeon-toolkit/EigenWorms.zip, unpack it into a folder of its "
        "own, and pass that with --data.path."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.splits not in ("archive", "pooled"):
            raise unknown("`splits`", self.splits, ["archive", "pooled"])
        if not 0 < self.validation_share < 1:
            raise ValueError(f"`validation_share` must be between 0 and 1; got {self.validation_share}.")
        require_at_least(self, seed=0)

    @property
    def n_features(self) -> int | None:
        """Real numbers per step; None until the task is `prepared`, unless it is given."""
        return self.n_dimensions

    @property
    def n_outputs(self) -> int:
        """Number of target classes; 1 until the task is `prepared`, unless it is given."""
        return self.n_classes or 1

    @property
    def chance(self) -> float:
        """Expected accuracy of a uniform guess; the files are read for it."""
        return 1 / self.prepared().n_outputs

    def prepared(self) -> "Uea":
        """Return the task with `n_dimensions` and `n_classes`, once its files are read.

        Raises:
            DataError: a file is missing, damaged, or something else than it should be.
            ValueError: it has other numbers of them than the task.
        """
        classes, splits = self._content
        n_dimensions, n_classes = splits["train"].values.shape[-1], len(classes)
        for name, number in (("n_dimensions", n_dimensions), ("n_classes", n_classes)):
            if getattr(self, name) not in (None, number):
                raise ValueError(
                    f"`{name}` must be {number}, as in {self.path}; got {getattr(self, name)}. Leave it out."
                )
        task = dataclasses.replace(self, n_dimensions=n_dimensions, n_classes=n_classes)
        # the files need not be read again
        task.__dict__["_content"] = self._content
        return task

    def score(self, predictions: Int64[Tensor, "n"], split: LabelledSource) -> dict[str, Any]:
        """Compare predictions with the labels of a split, as every task of classes does."""
        return scores_by_class(predictions, split.labels, self.prepared().n_outputs)

    def read(self) -> dict[SplitName, LabelledSeries]:
        """Read the files, and return all splits.

        Raises:
            DataError: what `prepared` raises.
        """
        return self._content[1]

    @cached_property
    def _content(self) -> tuple[tuple[str, ...], dict[SplitName, LabelledSeries]]:
        """The names of the classes, and all splits."""
        train, test = self._files()
        series, labels = train.series + test.series, np.concatenate([train.labels, test.labels])
        parts = self._parts(series, labels, n_train=len(train.series))
        for name, places in parts.items():
            if not len(places):
                raise DataError(
                    f"{self.path} has {len(series)} series, too few for the split {name!r}. Pass another "
                    "`validation_share`, or `splits`."
                )
        mean, std = _statistics([series[place] for place in parts["train"]])
        # batches have the same shape in all splits
        longest, equal = max(map(len, series)), len(set(map(len, series))) == 1

        def part(places: NDArray[np.int64]) -> LabelledSeries:
            values = torch.zeros(len(places), longest, series[0].shape[1])
            for row, place in zip(values.numpy(), places, strict=True):
                row[: len(series[place])] = series[place]
            lengths = None if equal else torch.tensor([len(series[place]) for place in places])
            return LabelledSeries(values, torch.from_numpy(labels[places]), mean, std, lengths)

        return train.classes, {name: part(places) for name, places in parts.items()}

    def _files(self) -> tuple[TsFile, TsFile]:
        folder = self.folder()
        found = {path.name.removesuffix("_TRAIN.ts") for path in folder.glob("*_TRAIN.ts")}
        # archives of series of unequal length have a second version of them
        names = sorted(found - {name + variant for name in found for variant in VARIANTS})
        if len(names) != 1 or not (folder / f"{names[0]}_TEST.ts").exists():
            raise DataError(
                f"{folder} must have the files NAME_TRAIN.ts and NAME_TEST.ts of one data set; it has "
                f"{', '.join(sorted(path.name for path in folder.glob('*.ts'))) or 'none'}. {self.wanted}"
            )
        train, test = (read_ts(folder / f"{names[0]}_{part}.ts") for part in ("TRAIN", "TEST"))
        for what, one, other in (
            ("classes", train.classes, test.classes),
            ("dimensions", train.series[0].shape[1], test.series[0].shape[1]),
        ):
            if one != other:
                raise DataError(
                    f"the files of {folder} must have the same {what}; those for training have {one}, those "
                    f"for testing {other}. They are of different data sets."
                )
        return train, test

    def _parts(
        self, series: list[NDArray[np.float32]], labels: NDArray[np.int64], *, n_train: int
    ) -> dict[SplitName, NDArray[np.int64]]:
        """Return the numbers of the series of each split."""
        random = np.random.default_rng(self.seed)
        if self.splits == "pooled":
            drawn = random.permutation(_first_ones(series, range(len(series))))
            train, validation, test = np.split(drawn, [int(share * len(drawn)) for share in POOLED])
            return {"train": train, "validation": validation, "test": test}
        # what is tested for is neither learned from nor chosen by
        tested = range(n_train, len(series))
        first = _first_ones(series, [*tested, *range(n_train)])
        rest = np.array([place for place in first if place < n_train], dtype=np.int64)
        shares = (1 - self.validation_share, self.validation_share)
        train, validation = (rest[part] for part in stratified(labels[rest], shares, random))
        return {"train": train, "validation": validation, "test": np.array(tested)}


def _first_ones(series: list[NDArray[np.float32]], order: Iterable[int]) -> list[int]:
    """Return the numbers of series, in an order, without those that are equal to an earlier one."""
    seen: dict[bytes, int] = {}
    for place in order:
        seen.setdefault(hashlib.sha256(series[place].tobytes()).digest(), place)
    return list(seen.values())


def _statistics(series: list[NDArray[np.float32]]) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each dimension, shape (1, f), of all values that are there."""
    found = [one.astype(np.float64) for one in series]
    count = np.maximum(sum((~np.isnan(one)).sum(0) for one in found), 1)
    mean = sum(np.nansum(one, axis=0) for one in found) / count
    square = sum(np.nansum((one - mean) ** 2, axis=0) for one in found) / count
    # a dimension that never changes is 0 after its mean is taken away
    std = np.where(square > 0, np.sqrt(square), 1.0)
    return torch.from_numpy(mean).float()[None], torch.from_numpy(std).float()[None]
