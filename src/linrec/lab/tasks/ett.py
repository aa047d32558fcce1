"""ETT: forecast the oil temperature of electricity transformers, from two years of measurements.

Source: Zhou and others (2021), arXiv:2012.07436 (Informer), for the data and their splits; Gu, Goel and Ré
(2022), arXiv:2111.00396 (S4), table 4 and code, for forecasting with a sequence whose end is masked.
"""

import csv
import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int64
from numpy.typing import NDArray
from torch import Tensor

from linrec.errors import unknown
from linrec.lab.tasks.base import (
    Batch,
    ObjectiveName,
    SplitName,
    StoredSource,
    errors_of_numbers,
    require_at_least,
)
from linrec.lab.tasks.files import FileTask
from linrec.text import DataError

__all__ = ["Ett", "Windows"]

SERIES = ("HUFL", "HULL", "MUFL", "MULL", "LUFL", "LULL", "OT")
"""Columns after the date: high, middle and low load, each useful and useless; and the oil temperature."""
MONTH = 30 * 24
"""Hours per month of 30 days, as in Informer."""
MONTHS: Mapping[SplitName, tuple[int, int]] = {"train": (0, 12), "validation": (12, 16), "test": (16, 20)}
CALENDAR = 5
"""Number of calendar features."""
PER_HOUR: Mapping[int, int] = {3600: 1, 900: 4}
"""Steps per hour, by the seconds per step."""


@dataclass(frozen=True, eq=False)
class Windows(StoredSource):
    """All windows over a series x, with the end of each window hidden: a `Source`.

        inputs_i = (x_i, 0, c_i), ..., (x_{i+m-1}, 0, c_{i+m-1}), (0, 1, c_{i+m}), ..., (0, 1, c_{i+m+h-1})
        targets_i = NaN, ..., NaN, x_{i+m}, ..., x_{i+m+h-1}

    Attributes:
        series: x, shape (n, f), float32.
        calendar: c, calendar features, which are never hidden, shape (n, k), float32.
        shown: number of shown steps, m.
        horizon: number of steps to predict, h.

    Example:
        >>> split = Windows(torch.arange(5.0)[:, None], torch.empty(5, 0), shown=2, horizon=1)
        >>> batch = split.rows(torch.tensor([1]))
        >>> len(split), batch.inputs.tolist(), batch.targets[0, :, 0]
        (3, [[[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]]], tensor([nan, nan, 3.]))
    """

    series: Float[Tensor, "n f"]
    calendar: Float[Tensor, "n k"]
    shown: int
    horizon: int

    def __len__(self) -> int:
        return max(0, len(self.series) - self.shown - self.horizon + 1)

    def rows(self, index: Int64[Tensor, "b"]) -> Batch:
        """Return windows as a batch, by the indices of their first steps.

        Returns:
            Inputs, shape (b, shown + horizon, f + 1 + k), float32; targets, shape (b, shown + horizon, f),
            NaN at shown steps.
        """
        device = self.series.device
        step = torch.arange(self.shown + self.horizon, device=device)
        place = index.to(device)[:, None] + step
        hidden = (step >= self.shown)[None, :, None].expand(len(place), -1, 1)
        values = self.series[place]
        inputs = torch.cat([values.masked_fill(hidden, 0), hidden.float(), self.calendar[place]], dim=-1)
        return Batch(inputs, values.masked_fill(~hidden, torch.nan), None)


@dataclass(frozen=True, kw_only=True)
class Ett(FileTask):
    """Forecast the continuation of a time series.

        x_1, ..., x_shown, hidden * horizon   ->   x_{shown+1}, ..., x_{shown+horizon}

    The file is ETTh1.csv, ETTh2.csv, ETTm1.csv or ETTm2.csv from github.com/zhouhaoyi/ETDataset. It has a
    header line, then a line for each hour, or quarter of an hour, with the date and seven numbers. The first
    12 months of 30 days are for training, the next 4 for validation, the next 4 for testing; the rest is
    unused. Numbers are normalised with mean and standard deviation of the training months.

    Every window is a sample. The targets of different splits do not overlap, but the first windows of the
    validation and test splits have inputs from the split before.

    The features of a step are the series, or zeros if it is hidden; a flag that is 1 if it is hidden; and the
    calendar.

    Args:
        path: the file.
        shown: number of shown steps.
        horizon: number of steps to predict; 24 to 720 in Informer.
        multivariate: whether all seven series are inputs and targets; if not, only `target` is.
        target: name of the series: "OT", the oil temperature, or a load.
        calendar: whether every step has features for minute, hour, weekday, day of the month and day of the
            year, each in [-1/2, 1/2], also at hidden steps.

    Source: Informer for data and splits; windows of 384 + 96 steps of OT are the default of S4's code, whose
    models see the calendar of the shown steps.

    Example:
        >>> from pathlib import Path
        >>> task = Ett(path=Path("ETTh1.csv"), horizon=24)
        >>> task.n_features, task.n_outputs
        (2, 1)
    """

    shown: int = 384
    horizon: int = 96
    multivariate: bool = False
    target: str = "OT"
    calendar: bool = False
    per_sequence: ClassVar[bool] = False
    objective: ClassVar[ObjectiveName] = "regression"
    vocab_size: ClassVar[int | None] = None
    reset_token: ClassVar[int | None] = None
    wanted: ClassVar[str] = (
        "Download ETTh1.csv, ETTh2.csv, ETTm1.csv or ETTm2.csv from the folder ETT-small of "
        "https://github.com/zhouhaoyi/ETDataset, and pass the file with --data.path."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, shown=1, horizon=1)
        if self.target not in SERIES:
            raise unknown("`target`", self.target, SERIES)

    @property
    def n_features(self) -> int:
        """Number of input features per step: the series, the flag of hidden steps, and the calendar."""
        return self.n_outputs + 1 + CALENDAR * self.calendar

    @property
    def n_outputs(self) -> int:
        """Real numbers per target: the number of series."""
        return len(SERIES) if self.multivariate else 1

    @property
    def chance(self) -> float:
        """Mean squared error of the training mean, as `trivial_score`; the task has no natural constant."""
        return self.trivial_score

    @cached_property
    def trivial_score(self) -> float:
        """Mean squared error on the test split of always predicting the mean of the training months."""
        test = self.split("test")
        # the mean is 0 after normalisation
        zeros = torch.zeros(1).expand(len(test), self.shown + self.horizon, self.n_outputs)
        return float(self.score(zeros, test)["mse"])

    def score(self, predictions: Float[Tensor, "n t f"], split: Windows) -> dict[str, Any]:
        """Return scores of predictions on a split.

        Args:
            predictions: real numbers for each step of each window, shape (n, shown + horizon, f), on any
                device; shown steps are ignored.
            split: the split of the targets.

        Returns:
            "mse" and "mae" of normalised values, as in the literature, and "nrmse", which is 1 for the best
            constant.
        """
        return dict(errors_of_numbers(predictions, split))

    def read(self) -> dict[SplitName, Windows]:
        """Read the file, and return all splits."""
        path = self.existing()
        dates, values = _table(path, self.wanted)
        apart = np.diff(dates)
        per_hour = PER_HOUR.get(apart[0].astype(int))
        if per_hour is None:
            raise DataError(
                f"the lines of {path} must be an hour or a quarter of an hour apart; the first two are "
                f"{dates[0]} and {dates[1]}. {self.wanted}"
            )
        if len(uneven := np.flatnonzero(apart != apart[0])):
            raise DataError(
                f"the lines of {path} must all be {apart[0]} apart; got {dates[uneven[0] + 1]} after "
                f"{dates[uneven[0]]} in line {uneven[0] + 3}. It is damaged: get it again."
            )
        month = MONTH * per_hour
        needed = month * MONTHS["test"][1]
        if len(values) < needed:
            raise DataError(
                f"{path} must have at least {needed} lines of numbers, 20 months; it has {len(values)}. It "
                "is truncated: get it again."
            )
        if not self.multivariate:
            values = values[:, [SERIES.index(self.target)]]
        training = values[: month * MONTHS["train"][1]]
        mean, std = training.mean(0), training.std(0)
        if not std.all():
            raise DataError(f"a series of {path} is constant in the training months; it cannot be learned.")
        series = torch.from_numpy(((values - mean) / std).astype(np.float32))
        calendar = torch.from_numpy(_calendar(dates)[:, : CALENDAR * self.calendar])

        splits: dict[SplitName, Windows] = {}
        for name, (first, last) in MONTHS.items():
            # a later split includes the end of the split before, so that its first target is its first value
            steps = slice(max(0, first * month - self.shown), last * month)
            splits[name] = Windows(series[steps], calendar[steps], self.shown, self.horizon)
            if not len(splits[name]):
                raise ValueError(
                    f"`shown` + `horizon` = {self.shown} + {self.horizon} steps must fit into the split "
                    f"{name!r}; it has {len(series[steps])}. Pass fewer."
                )
        return splits


def _table(path: Path, wanted: str) -> tuple[NDArray[np.datetime64], NDArray[np.float64]]:
    """Return the dates, shape (n), and the numbers, shape (n, f), of a file."""
    names = ["date", *SERIES]
    dates: list[datetime.datetime] = []
    values: list[list[float]] = []
    try:
        # utf-8-sig, because spreadsheets may write a byte order mark
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = csv.reader(file)
            header = next(lines, [])
            if header != names:
                raise DataError(
                    f"{path} must begin with the line {','.join(names)}; it begins with "
                    f"{','.join(header)[:80] or 'nothing'}. {wanted}"
                )
            for line in lines:
                if len(line) != len(names):
                    raise ValueError(f"{len(line)} entries")
                values.append([float(entry) for entry in line[1:]])
                dates.append(_date(line[0]))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (csv.Error, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{path} must have a date like 2016-07-01 00:00:00 and {len(SERIES)} numbers in each line; got "
            f"{error} in line {len(dates) + 2}. It is damaged: get it again."
        ) from error
    found, times = np.array(values), np.array(dates, dtype="datetime64[s]")
    if len(times) < 2 or not np.isfinite(found).all():
        raise DataError(
            f"{path} must have finite numbers in at least two lines; it has {len(times)} lines, and "
            f"{np.size(found) - np.isfinite(found).sum()} other numbers. It is damaged: get it again."
        )
    return times, found


def _date(entry: str) -> datetime.datetime:
    date = datetime.datetime.fromisoformat(entry)
    # a time zone would change the calendar features
    if date.tzinfo is not None:
        raise ValueError(f"{entry[:40]}, which has a time zone,")
    return date


def _calendar(dates: NDArray[np.datetime64]) -> NDArray[np.float32]:
    """Return minute, hour, weekday from Monday, day of the month and day of the year, shape (n, 5)."""
    hours, days, months, years = (dates.astype(f"datetime64[{unit}]") for unit in "hDMY")
    # the first day of datetime64 was a Thursday
    counts = (
        ((dates - hours).astype("timedelta64[m]"), 59),
        (hours - days, 23),
        ((days.astype(np.int64) + 3) % 7, 6),
        (days - months, 30),
        (days - years, 365),
    )
    return np.stack([count.astype(np.int64) / last - 0.5 for count, last in counts], axis=1).astype(
        np.float32
    )
