"""Tasks of the archives of time series of UEA, UCR and Monash, and the reader of their .ts files.

In a .ts file, lines that begin with # are comments. The header has lines that begin with @, up to @data.
After it, each line is a series: its dimensions, separated by colons, each with values separated by commas;
and its class after the last colon, or in an archive of regressions a number. A missing value is a question
mark.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from numpy.typing import NDArray
from torch import Tensor

from linrec.lab.corpora.corpus import ReadingDisplay
from linrec.lab.tasks.base import (
    ObjectiveName,
    SplitName,
    errors_of_numbers,
    scores_by_class,
)
from linrec.lab.tasks.files import FileTask
from linrec.lab.tasks.labelled import (
    ClassificationTask,
    LabelledSeries,
    LabelledSource,
    stratified,
)
from linrec.text import DataError

__all__ = ["TsArchive", "TsFile", "Tser", "Uea", "read_ts"]


class TsFile(NamedTuple):
    """The content of a .ts file.

    Args:
        classes: names of the classes, in the order of the header; empty if labels are numbers.
        series: an array per series, shape (t, f), float32; t may differ; NaN for missing values.
        labels: class of each series, as an index of `classes`, shape (n), int64; or its number, float64.
    """

    classes: tuple[str, ...]
    series: list[Float[np.ndarray, "t f"]]
    labels: Int64[np.ndarray, "n"] | Float64[np.ndarray, "n"]


def read_ts(path: Path, *, numbers: bool = False) -> TsFile:
    """Read a file of labelled series without time stamps.

    Args:
        path: the file.
        numbers: whether the labels must be real numbers; if not, they must be classes.
    """
    header: dict[str, list[str]] = {}
    series: list[NDArray[np.float32]] = []
    labels: list[float] = []
    classes: dict[str, int] = {}
    try:
        # errors="replace", because names in comments may have another encoding
        with (
            path.open(encoding="utf-8-sig", errors="replace") as file,
            ReadingDisplay().reading(f"reading {path.name}", path.stat().st_size) as advance,
        ):
            for place, line in enumerate(file, start=1):
                advance(len(line))
                text = line.strip()
                if not text or text.startswith("#"):
                    continue
                if "data" not in header:
                    if not text.startswith("@"):
                        raise DataError(
                            f"{path} must begin with lines of @, up to @data; got {text[:40]!r} in line "
                            f"{place}. It is not a .ts file."
                        )
                    name, *values = text[1:].split() or [""]
                    header[name.lower()] = values
                    if name.lower() == "data":
                        _check(path, header, numbers=numbers)
                        found = [] if numbers else header["classlabel"][1:]
                        classes = {name: number for number, name in enumerate(found)}
                    continue
                try:
                    one, label = _series(text, None if numbers else classes)
                    if series and one.shape[1] != series[0].shape[1]:
                        raise ValueError(f"{one.shape[1]} dimensions after {series[0].shape[1]} in the first")
                except ValueError as error:
                    kind = "number" if numbers else "class"
                    raise DataError(
                        f"{path} must have values, separated by commas and colons, and a {kind} in each "
                        f"line; got {error} in line {place}. It is damaged: get it again."
                    ) from error
                series.append(one)
                labels.append(label)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    if not series:
        raise DataError(f"{path} has no series after its header. It is truncated: get it again.")
    return TsFile(tuple(classes), series, np.array(labels, dtype=np.float64 if numbers else np.int64))


def _check(path: Path, header: dict[str, list[str]], *, numbers: bool) -> None:
    """Check that the header announces series without time stamps, and labels of the expected kind."""
    if [word.lower() for word in header.get("timestamps", ["false"])] != ["false"]:
        raise DataError(f"{path} has time stamps; only series without time stamps can be read.")
    if numbers:
        if [word.lower() for word in header.get("targetlabel", [])] != ["true"]:
            raise DataError(
                f"{path} must announce numbers in a line @targetLabel true; got "
                f"{' '.join(header.get('targetlabel', ['none']))!r}. Only regression data sets can be read."
            )
        return
    has_classes, *names = header.get("classlabel") or ["false"]
    if has_classes.lower() != "true" or len(set(names)) != len(names) or not names:
        raise DataError(
            f"{path} must name its classes in a line such as @classLabel true 1 2; got "
            f"{' '.join(header.get('classlabel', ['none']))!r}. Only classification data sets can be read."
        )


def _series(line: str, classes: dict[str, int] | None) -> tuple[NDArray[np.float32], float]:
    """Return a series and its label: a number if `classes` is None."""
    *dimensions, last = line.split(":")
    label = _number(last) if classes is None else classes.get(last.strip())
    if label is None:
        raise ValueError(f"a class {last.strip()[:40]!r} that is not in the header")
    if not dimensions:
        raise ValueError("no values")
    columns = [np.array(d.replace("?", "nan").split(","), dtype=np.float64) for d in dimensions]
    if len({len(column) for column in columns}) > 1:
        raise ValueError(f"dimensions of {sorted({len(column) for column in columns})} values")
    one = np.stack(columns, axis=1)
    if len(infinite := one[np.abs(one) > np.finfo(np.float32).max]):
        raise ValueError(f"{infinite[0]}, which is not a finite float32 number,")
    return one.astype(np.float32), label


def _number(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"a label {text.strip()[:40]!r} that is not finite")
    return number


POOLED = (0.7, 0.85)
"""Cumulative fractions of the pooled splits: 70% for training, 15% for validation, 15% for testing."""
VARIANTS = ("_eq", "_nmv", "_eq_nmv")
"""Suffixes of alternative versions of a data set: with equal lengths, or without missing values."""


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

    """

    splits: Literal["archive", "pooled"] = "archive"
    validation_share: float = 0.15
    seed: int = 0
    n_dimensions: int | None = None
    vocab_size: ClassVar[int | None] = None
    content_in: ClassVar[tuple[str, ...]] = ("content",)
    least: ClassVar[Mapping[str, int]] = {"seed": 0}
    numbers: ClassVar[bool]
    """Whether the labels are real numbers; if not, they are classes."""

    def check(self) -> None:
        """Require a share."""
        if not 0 < self.validation_share < 1:
            raise ValueError(f"`validation_share` must be between 0 and 1; got {self.validation_share}.")

    @property
    def n_features(self) -> int | None:
        """Number of input features per step; None before `prepared`, unless `n_dimensions` is given."""
        return self.n_dimensions

    def sizes(self) -> dict[str, int]:
        """Return the values of fields that are in the files."""
        return {"n_dimensions": self.content[1]["train"].values.shape[-1]}

    def read(self) -> dict[SplitName, LabelledSeries]:
        """Read the files, and return all splits."""
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


@dataclass(frozen=True, kw_only=True)
class Uea(TsArchive, ClassificationTask):
    """Classify multivariate time series of a UEA or UCR data set.

        target = class, given x_1, ..., x_t of f numbers each

    Args:
        n_classes: number of classes; None reads it from the files.

    Source: Bagnall and others (2018, arXiv:1811.00075) for the archive; its data set EigenWorms has 259
    series of 17,984 steps. Walker and others (2024, arXiv:2402.18512) for pooled splits without exact
    duplicates; their five seeds give other splits than the same seeds in this task.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> series = "1,2:0,1:a\\n2,3:1,0:a\\n5,6:0,0:b\\n6,7:1,1:b\\n"
        >>> for part in ("TRAIN", "TEST"):
        ...     _ = (folder / f"Tiny_{part}.ts").write_text(f"@classLabel true a b\\n@data\\n{series}")
        ...     series = "9,9:8,8:a\\n"
        >>> task = Uea(path=folder, validation_share=0.5).prepared()
        >>> task.n_features, task.n_outputs, len(task.split("validation"))
        (2, 2, 2)
    """

    n_classes: int | None = None
    numbers: ClassVar[bool] = False
    wanted: ClassVar[str] = (
        "Download a data set of https://timeseriesclassification.com, such as "
        "https://timeseriesclassification.com/aeon-toolkit/EigenWorms.zip, unpack it into a new folder, and "
        "pass this folder with --data.path."
    )

    @property
    def n_outputs(self) -> int:
        """Number of target classes; 1 before `prepared`, unless `n_classes` is given."""
        return self.n_classes or 1

    @property
    def chance(self) -> float:
        """Expected accuracy of a uniform guess; reads the files."""
        return 1 / self.prepared().n_outputs

    def sizes(self) -> dict[str, int]:
        """Return the number of dimensions and of classes in the files."""
        return {**super().sizes(), "n_classes": len(self.content[0])}

    def score(self, predictions: Int64[Tensor, "n"], split: LabelledSource) -> dict[str, Any]:
        """Return the accuracy of predictions on a split; see `ClassificationTask.score`."""
        return scores_by_class(predictions, split.labels, self.prepared().n_outputs)


@dataclass(frozen=True, kw_only=True)
class Tser(TsArchive):
    """Estimate a number from a multivariate time series, with any regression data set of the archive.

        target = number, given x_1, ..., x_t of f numbers each

    Targets have the unit of the file, and inputs are normalised.

    The data sets BIDMC32RR, BIDMC32HR and BIDMC32SpO2 have 7,949 series of 4,000 steps: two signals, over 32
    seconds. The series of BIDMC are windows of 53 recordings of 8 minutes. So they overlap, and in pooled
    splits, test series contain steps of training series. Errors are errors for known recordings.

    Source: Tan and others (2020, arXiv:2006.10996), the archive of Monash, UEA and UCR, for the data;
    UnICORNN and LEM (Rusch and others, 2021 and 2022) for pooled splits of 70%, 15% and 15%.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> series = "1,2:0,1:15.5\\n2,3:1,0:16\\n5,6:0,0:12\\n6,7:1,1:11\\n"
        >>> for part in ("TRAIN", "TEST"):
        ...     _ = (folder / f"Tiny_{part}.ts").write_text(f"@targetLabel true\\n@data\\n{series}")
        ...     series = "9,9:8,8:14.5\\n"
        >>> task = Tser(path=folder, validation_share=0.5).prepared()
        >>> task.n_features, task.split("test").labels
        (2, tensor([[14.5000]]))
    """

    per_sequence: ClassVar[bool] = True
    objective: ClassVar[ObjectiveName] = "regression"
    n_outputs: ClassVar[int] = 1
    reset_token: ClassVar[int | None] = None
    numbers: ClassVar[bool] = True
    wanted: ClassVar[str] = (
        "Download a regression data set of http://tseregression.org, such as BIDMC32HR, unpack it into a new "
        "folder, and pass this folder with --data.path. All data sets are in the archive of "
        "https://zenodo.org/record/3902651."
    )

    @property
    def chance(self) -> float:
        """Mean squared error of the training mean, as `trivial_score`; reads the files."""
        return self.trivial_score

    @cached_property
    def trivial_score(self) -> float:
        """Mean squared error on the test split of always predicting the mean training target."""
        train, test = (self.split(name).labels.double() for name in ("train", "test"))
        return float((test - train.mean()).square().mean())

    def score(self, predictions: Float[Tensor, "n 1"], split: LabelledSeries) -> dict[str, Any]:
        """Return scores of predictions on a split.

        Args:
            predictions: a real number for each series, shape (n, 1), on any device.
            split: the split of the targets.

        Returns:
            "mse", "mae" and "rmse", the root of "mse", in the unit of the file; and "nrmse", which is 1 for
            the best constant.
        """
        errors = errors_of_numbers(predictions, split)
        assert errors["mse"] is not None
        return {**errors, "rmse": math.sqrt(errors["mse"])}
