"""Forecasts of time series in CSV files: electricity transformers (ETT), consumption (ECL), weather.

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
)
from linrec.lab.tasks.files import FileTask
from linrec.text import DataError

__all__ = ["Ett", "Forecast", "Windows"]

SERIES = ("HUFL", "HULL", "MUFL", "MULL", "LUFL", "LULL", "OT")
"""Columns after the date: high, middle and low load, each useful and useless; and the oil temperature."""
MONTH = 30 * 24
"""Hours per month of 30 days, as in Informer."""
MONTHS: Mapping[SplitName, tuple[int, int]] = {"train": (0, 12), "validation": (12, 16), "test": (16, 20)}
SHARES = (0.7, 0.2)
"""Shares of the lines for training and for testing, as in Informer for all data but ETT."""
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
class Forecast(FileTask):
    """Forecast the continuation of time series in a CSV file, such as ECL and Weather.

        x_1, ..., x_shown, hidden * horizon   ->   x_{shown+1}, ..., x_{shown+horizon}

    The file has a header line, "date" and the names of the series, then a line for each step, with the date
    and a number for each series. The first 70% of the lines are for training, the last 20% for testing, and
    the lines between them for validation. Numbers are normalised with mean and standard deviation of the
    training lines.

    Every window is a sample. The targets of different splits do not overlap, but the first windows of the
    validation and test splits have inputs from the split before.

    The features of a step are the series, or zeros if it is hidden; a flag that is 1 if it is hidden; and the
    calendar.

    Args:
        path: the file.
        shown: number of shown steps.
        horizon: number of steps to predict; 24 to 960 in Informer.
        multivariate: whether all series are inputs and targets; if not, only `target` is.
        target: name of the series; None is the last one.
        calendar: whether every step has features for minute, hour, weekday, day of the month and day of the
            year, each in [-1/2, 1/2], also at hidden steps.
        n_series: number of series in the file; None reads it from the file.

    Source: Informer for data and splits: ECL.csv has 26,304 hours of the electricity consumption of 321
    clients, with the target MT_320, and WTH.csv 35,064 hours of 12 measurements of the weather, with the
    target WetBulbCelsius. Windows of 384 + 96 steps are the default of S4's code. Autoformer (Wu and others,
    2021, arXiv:2106.13008) has other files in the same format, electricity.csv, weather.csv and traffic.csv,
    with the same shares.

    Example:
        >>> from pathlib import Path
        >>> task = Forecast(path=Path("ECL.csv"), target="MT_320", horizon=24)
        >>> task.n_features, task.n_outputs
        (2, 1)
    """

    shown: int = 384
    horizon: int = 96
    multivariate: bool = False
    target: str | None = None
    calendar: bool = False
    n_series: int | None = None
    per_sequence: ClassVar[bool] = False
    objective: ClassVar[ObjectiveName] = "regression"
    vocab_size: ClassVar[int | None] = None
    reset_token: ClassVar[int | None] = None
    content_in: ClassVar[tuple[str, ...]] = ("_content",)
    least: ClassVar[Mapping[str, int]] = {"shown": 1, "horizon": 1, "n_series": 1}
    series: ClassVar[tuple[str, ...] | None] = None
    """Names that the header must have; None takes any."""
    wanted: ClassVar[str] = (
        "Download ECL.csv or WTH.csv by the link in the README of https://github.com/zhouhaoyi/Informer2020, "
        "or electricity.csv or weather.csv by the link of https://github.com/thuml/Autoformer, and pass the "
        "file with --data.path."
    )

    @property
    def n_features(self) -> int:
        """Number of input features per step: the series, the flag of hidden steps, and the calendar."""
        return self.n_outputs + 1 + CALENDAR * self.calendar

    @property
    def n_outputs(self) -> int:
        """Real numbers per target: the number of series; 1 before `prepared`, unless `n_series` is given."""
        return (self.n_series or 1) if self.multivariate else 1

    def sizes(self) -> dict[str, int]:
        """Return the number of series in the file."""
        return {"n_series": len(self._content[0])}

    @property
    def chance(self) -> float:
        """Mean squared error of the training mean, as `trivial_score`; the task has no natural constant."""
        return self.trivial_score

    @cached_property
    def trivial_score(self) -> float:
        """Mean squared error on the test split of always predicting the mean of the training lines."""
        test = self.split("test")
        # the mean is 0 after normalisation
        zeros = torch.zeros(1).expand(len(test), self.shown + self.horizon, test.series.shape[1])
        return float(self.score(zeros, test)["mse"])

    def score(self, predictions: Float[Tensor, "n t f"], split: Windows) -> dict[str, Any]:
        """Return "mse", "mae" and "nrmse" of normalised values, as in the literature.

        Predictions are real numbers for each step of each window; shown steps are ignored. The best constant
        has an "nrmse" of 1.
        """
        return dict(errors_of_numbers(predictions, split))

    def read(self) -> dict[SplitName, Windows]:
        """Read the file, and return all splits."""
        path = self.existing()
        names, dates, values = self._content
        bounds = self.bounds(dates)
        if not self.multivariate:
            target = names[-1] if self.target is None else self.target
            if target not in names:
                raise unknown("`target`", target, names)
            values = values[:, [names.index(target)]]
        training = values[slice(*bounds["train"])]
        mean, std = training.mean(0), training.std(0)
        if not std.all():
            raise DataError(f"a series of {path} is constant in the training lines; it cannot be learned.")
        series = torch.from_numpy(((values - mean) / std).astype(np.float32))
        calendar = torch.from_numpy(_calendar(dates)[:, : CALENDAR * self.calendar])

        splits: dict[SplitName, Windows] = {}
        for name, (first, last) in bounds.items():
            # a later split includes the end of the split before, so that its first target is its first value
            steps = slice(max(0, first - self.shown), last)
            splits[name] = Windows(series[steps], calendar[steps], self.shown, self.horizon)
            if not len(splits[name]):
                raise ValueError(
                    f"`shown` + `horizon` = {self.shown} + {self.horizon} steps must fit into the split "
                    f"{name!r}; it has {len(series[steps])}. Pass fewer."
                )
        return splits

    def bounds(self, dates: NDArray[np.datetime64]) -> dict[SplitName, tuple[int, int]]:
        """Return the first line of each split, and the line after its last one."""
        n = len(dates)
        train, test = int(n * SHARES[0]), n - int(n * SHARES[1])
        return {"train": (0, train), "validation": (train, test), "test": (test, n)}

    @cached_property
    def _content(self) -> tuple[list[str], NDArray[np.datetime64], NDArray[np.float64]]:
        return _table(self.existing(), self.wanted, self.series)


@dataclass(frozen=True, kw_only=True)
class Ett(Forecast):
    """Forecast the oil temperature of electricity transformers, ETT.

    The file is ETTh1.csv, ETTh2.csv, ETTm1.csv or ETTm2.csv from github.com/zhouhaoyi/ETDataset. It has a
    line for each hour, or quarter of an hour, with the date and seven numbers. The first 12 months of 30 days
    are for training, the next 4 for validation, the next 4 for testing; the rest is unused. See `Forecast`
    for samples, features and arguments.

    Args:
        target: name of the series: "OT", the oil temperature, or a load.

    Source: Informer for data and splits; windows of 384 + 96 steps of OT are the default of S4's code, whose
    models see the calendar of the shown steps.

    Example:
        >>> from pathlib import Path
        >>> task = Ett(path=Path("ETTh1.csv"), horizon=24)
        >>> task.n_features, task.n_outputs
        (2, 1)
    """

    target: str | None = "OT"
    n_series: int | None = len(SERIES)
    series: ClassVar[tuple[str, ...] | None] = SERIES
    wanted: ClassVar[str] = (
        "Download ETTh1.csv, ETTh2.csv, ETTm1.csv or ETTm2.csv from the folder ETT-small of "
        "https://github.com/zhouhaoyi/ETDataset, and pass the file with --data.path."
    )

    def check(self) -> None:
        """Require the name of a series."""
        if self.target not in SERIES:
            raise unknown("`target`", str(self.target), SERIES)

    def bounds(self, dates: NDArray[np.datetime64]) -> dict[SplitName, tuple[int, int]]:
        """Return the first line of each split, and the line after its last one."""
        apart = np.diff(dates)
        per_hour = PER_HOUR.get(apart[0].astype(int))
        if per_hour is None:
            raise DataError(
                f"the lines of {self.path} must be an hour or a quarter of an hour apart; the first two are "
                f"{dates[0]} and {dates[1]}. {self.wanted}"
            )
        if len(uneven := np.flatnonzero(apart != apart[0])):
            raise DataError(
                f"the lines of {self.path} must all be {apart[0]} apart; got {dates[uneven[0] + 1]} "
                f"after {dates[uneven[0]]} in line {uneven[0] + 3}. It is damaged: get it again."
            )
        month = MONTH * per_hour
        needed = month * MONTHS["test"][1]
        if len(dates) < needed:
            raise DataError(
                f"{self.path} must have at least {needed} lines of numbers, 20 months; it has {len(dates)}. "
                "It is truncated: get it again."
            )
        return {name: (first * month, last * month) for name, (first, last) in MONTHS.items()}


def _table(
    path: Path, wanted: str, series: tuple[str, ...] | None
) -> tuple[list[str], NDArray[np.datetime64], NDArray[np.float64]]:
    """Return names, f, dates, shape (n), and numbers, shape (n, f); names must be `series` if given."""
    dates: list[datetime.datetime] = []
    values: list[list[float]] = []
    header: list[str] = []
    try:
        # utf-8-sig, because spreadsheets may write a byte order mark
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = csv.reader(file)
            header = next(lines, [])
            expected = ["date", *(header[1:] if series is None else series)]
            if header != expected or len({*header}) != len(header) or len(header) < 2:
                names = "date,NAME,NAME,..., with distinct names" if series is None else ",".join(expected)
                raise DataError(
                    f"{path} must begin with the line {names}; it begins with "
                    f"{','.join(header)[:80] or 'nothing'}. {wanted}"
                )
            for line in lines:
                if len(line) != len(header):
                    raise ValueError(f"{len(line)} entries")
                values.append([float(entry) for entry in line[1:]])
                dates.append(_date(line[0]))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (csv.Error, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{path} must have a date like 2016-07-01 00:00:00 and {len(header) - 1} numbers in each line; "
            f"got {error} in line {len(dates) + 2}. It is damaged: get it again."
        ) from error
    found, times = np.array(values), np.array(dates, dtype="datetime64[s]")
    if len(times) < 2 or not np.isfinite(found).all():
        raise DataError(
            f"{path} must have finite numbers in at least two lines; it has {len(times)} lines, and "
            f"{np.size(found) - np.isfinite(found).sum()} other numbers. It is damaged: get it again."
        )
    return header[1:], times, found


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
