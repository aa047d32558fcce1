"""PhysioNet Sepsis: tell from the hours in intensive care whether a patient gets a sepsis."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from numpy.typing import NDArray
from torch import Tensor

from linrec.lab.corpora.corpus import ReadingDisplay
from linrec.lab.tasks.base import SplitName
from linrec.lab.tasks.files import FileTask
from linrec.lab.tasks.labelled import ClassificationTask, LabelledSeries, LabelledSource, stratified
from linrec.text import DataError

__all__ = ["Sepsis", "area_under_curve"]

SERIES = (
    *("HR", "O2Sat", "Temp", "SBP", "MAP", "DBP", "Resp", "EtCO2", "BaseExcess", "HCO3", "FiO2", "pH"),
    *("PaCO2", "SaO2", "AST", "BUN", "Alkalinephos", "Calcium", "Chloride", "Creatinine"),
    *("Bilirubin_direct", "Glucose", "Lactate", "Magnesium", "Phosphate", "Potassium", "Bilirubin_total"),
    *("TroponinI", "Hct", "Hgb", "PTT", "WBC", "Fibrinogen", "Platelets"),
)
STATIC = ("Age", "Gender", "Unit1", "Unit2", "HospAdmTime")
COLUMNS = (*SERIES, *STATIC, "ICULOS", "SepsisLabel")
SHARES = (0.7, 0.15, 0.15)


def area_under_curve(predictions: Float[Tensor, "n"], labels: Int64[Tensor, "n"]) -> float | None:
    """Return the area under the ROC curve: how often a random 1 has a higher prediction than a random 0.

        (sum of the ranks of the ones - n_1 (n_1 + 1) / 2) / (n_0 n_1)

    Args:
        predictions: a number per sample; equal numbers have their mean rank.
        labels: 0 or 1 per sample.

    Returns:
        A number from 0 to 1; None if all labels are equal.

    Example:
        >>> area_under_curve(torch.tensor([0.1, 0.4, 0.4, 0.8]), torch.tensor([0, 0, 1, 1]))
        0.875
    """
    _, place, counts = predictions.double().unique(return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1) / 2).double()[place]
    ones = int((labels == 1).sum())
    if not 0 < ones < len(labels):
        return None
    return float((ranks[labels == 1].sum() - ones * (ones + 1) / 2) / (ones * (len(labels) - ones)))


@dataclass(frozen=True, kw_only=True)
class Sepsis(FileTask, ClassificationTask):
    """Tell from the first hours in intensive care whether a patient has a sepsis in these hours.

        y = 1 if any of the hours has the label 1, else 0, given x_1, ..., x_t, t <= 72
        loss = -10 y log p(1) - (1 - y) log p(0)

    The folder has the files of PhysioNet's challenge of 2019, p*.psv, in it or below it: 20,336 patients of
    set A and 20,000 of set B. A file has a line per hour: 34 series, five numbers that stay the same, the
    hour and the label, separated by bars. Most values are missing. Stays of fewer than 3 hours are left out.

    A step has the last observed value of each series, or the mean before the first one; age, gender, the unit
    (twice) and the time before admission; and the hour. All are normalised with mean and standard deviation
    of the training split. Few patients have a sepsis, so that the loss weighs them ten times, and the area
    under the ROC curve compares models. The weighted losses of both classes are divided by the number of
    patients.

    Args:
        path: the folder.
        hours: maximum number of hours.
        intensity: whether a step also has the number of observations of each series up to it, and whether
            either unit is known.
        seed: seed of the split: of the patients with and without a sepsis, a random 70% are for training, 15%
            for validation and 15% for testing.

    Source: Reyna and others (2019), "Early prediction of sepsis from clinical data", for the data; Kidger and
    others (2020, arXiv:2005.08926), Neural CDE, section 4.2 and code, for the task and the features. Neural
    CDE has an area under the curve of 0.880 with intensity and 0.776 without; it interpolates, and gives
    constants to the initial state alone. With one output z in place of z_1 - z_0, its code has the same loss.

    Example:
        >>> Sepsis().n_features, Sepsis(intensity=False).n_features
        (76, 40)
    """

    hours: int = 72
    intensity: bool = True
    seed: int = 0
    class_weights: ClassVar[tuple[float, ...]] = (1.0, 10.0)
    least: ClassVar[Mapping[str, int]] = {"hours": 3, "seed": 0}
    wanted: ClassVar[str] = (
        "Download the training data of https://physionet.org/content/challenge-2019/1.0.0/, and pass the "
        "folder training, which has training_setA and training_setB, with --data.path."
    )

    @property
    def vocab_size(self) -> None:
        """Always None: inputs are real numbers."""
        return None

    @property
    def n_outputs(self) -> int:
        """Two classes."""
        return 2

    @cached_property
    def trivial_score(self) -> float:
        """Area under the curve of a constant, 1/2."""
        return 0.5

    @property
    def n_features(self) -> int:
        """Number of input features per step."""
        return len(SERIES) + len(STATIC) + 1 + self.intensity * (len(SERIES) + 2)

    def score(self, predictions: Float[Tensor, "n 2"], split: LabelledSource) -> dict[str, Any]:
        """Return scores of predictions on a split.

        Args:
            predictions: logarithms of both classes' probabilities, shape (n, 2), on any device.
            split: the split of the labels.

        Returns:
            "accuracy" and "accuracy_by_class"; and "auc", the area under the ROC curve, which is 1/2 for a
            constant.
        """
        if not predictions.is_floating_point():
            raise TypeError(
                f"`predictions` must be logarithms of probabilities (n, 2); got {predictions.dtype}. "
                "Pass the model's outputs."
            )
        odds = (predictions[:, 1] - predictions[:, 0]).cpu()
        of_classes = super().score(predictions.argmax(-1), split)
        return {**of_classes, "auc": area_under_curve(odds, split.labels.cpu())}

    def read(self) -> dict[SplitName, LabelledSeries]:
        """Read the files, and return all splits."""
        folder = self.folder()
        paths = sorted(folder.rglob("p*.psv"))
        if not paths:
            raise DataError(f"{folder} must have files p*.psv in it or below it; it has none. {self.wanted}")
        stays = []
        with ReadingDisplay().reading(f"reading {folder}", len(paths)) as advance:
            for path in paths:
                stays.append(self._stay(path))
                advance(1)
        stays = [stay for stay in stays if len(stay[0]) > 2]
        labels = np.array([label for _, label in stays], np.int64)
        parts = stratified(labels, SHARES, np.random.default_rng(self.seed))
        for name, places in zip(("train", "validation", "test"), parts, strict=True):
            if not len(places):
                raise DataError(
                    f"{folder} has {len(stays)} stays of 3 hours, too few for the split {name!r}."
                )
        lengths = np.array([len(steps) for steps, _ in stays])
        values = np.full((len(stays), self.hours, self.n_features), np.nan, np.float32)
        for row, (steps, _) in zip(values, stays, strict=True):
            row[: len(steps)] = steps
        mean, std = _statistics(values, parts[0])
        # repeat the last observed value
        for hour in range(1, self.hours):
            series, before = values[:, hour, : len(SERIES)], values[:, hour - 1, : len(SERIES)]
            np.copyto(series, before, where=np.isnan(series))

        def split(places: NDArray[np.int64]) -> LabelledSeries:
            return LabelledSeries(
                torch.from_numpy(values[places]),
                torch.from_numpy(labels[places]),
                mean,
                std,
                torch.from_numpy(lengths[places]),
            )

        train, validation, test = map(split, parts)
        return {"train": train, "validation": validation, "test": test}

    def _stay(self, path: Path) -> tuple[Float32[np.ndarray, "t f"], float]:
        """Return the features of a stay, NaN for missing values, and its label."""
        try:
            header, *lines = path.read_text(encoding="utf-8").splitlines() or [""]
            if header.split("|") != [*COLUMNS] or not lines:
                raise ValueError(f"the header {header[:60]!r}, and {len(lines)} lines")
            table = np.array([line.split("|") for line in lines], np.float32)
            hour = table[:, -2].astype(np.int64)
            if table.shape[1] != len(COLUMNS) or (np.diff(hour, prepend=0) < 1).any():
                raise ValueError(f"{table.shape[1]} columns, and the hours {hour.tolist()[:8]}")
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
        except ValueError as error:
            raise DataError(
                f"{path} must have the header {'|'.join(COLUMNS[:3])}|...|{COLUMNS[-1]}, and {len(COLUMNS)} "
                f"numbers in each line, with ascending hours; got {error}. It is damaged: get it again."
            ) from error
        table, hour = table[hour <= self.hours], hour[hour <= self.hours]
        n_steps = int(hour.max(initial=0))
        # an hour without a line has no observation
        series = np.full((n_steps, len(SERIES)), np.nan, np.float32)
        series[hour - 1] = table[:, : len(SERIES)]
        constant = table[-1:, len(SERIES) : -2] if n_steps else np.zeros((1, len(STATIC)), np.float32)
        features = [series, np.nan_to_num(constant).repeat(n_steps, 0)]
        features.append(np.arange(1, n_steps + 1, dtype=np.float32)[:, None])
        if self.intensity:
            features.append((~np.isnan(series)).cumsum(0).astype(np.float32))
            features.append((~np.isnan(constant[:, 2:4])).astype(np.float32).repeat(n_steps, 0))
        return np.concatenate(features, 1), float(table[:, -1].max(initial=0))


def _statistics(values: Float32[np.ndarray, "n t f"], places: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of the observed values of each feature, shape (1, f)."""
    found = []
    for feature in range(values.shape[-1]):
        column = values[places, :, feature]
        observed = column[~np.isnan(column)].astype(np.float64)
        std = observed.std() if len(observed) else 0.0
        found.append((observed.mean() if len(observed) else 0.0, std or 1.0))
    mean, std = torch.tensor(found).float().T
    return mean[None], std[None]
