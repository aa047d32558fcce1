"""HAR-2: tell activities apart, from the signals of a smartphone."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int64
from numpy.typing import NDArray

from linrec.lab.tasks.base import SplitName
from linrec.lab.tasks.files import FileTask
from linrec.lab.tasks.labelled import ClassificationTask, LabelledSeries
from linrec.text import DataError

__all__ = ["Har2"]

SIGNALS = tuple(f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")
"""Features of a step: acceleration without and with gravity, and angular velocity."""
STEPS = 128
GROUPS = (1, 0, 1, 0, 1, 0)
"""Class of walking, walking upstairs, walking downstairs, sitting, standing, laying: activities 1 to 6."""


@dataclass(frozen=True, kw_only=True)
class Har2(FileTask, ClassificationTask):
    """Tell two groups of activities apart, from the signals of a smartphone at the waist.

        class 0   sitting, laying, walking upstairs
        class 1   standing, walking, walking downstairs

    A series has 128 steps at 50 Hz, of 9 signals. The test split is the data's own: 2,947 series of 9
    persons. Of the 21 other persons, with 7,352 series, `n_validation_persons` validate. Two neighbouring
    series of a person share half of their steps, so a person is in a single split. Each signal is normalised
    with mean and standard deviation of the training split.

    Args:
        path: the folder of the data, with the folders train and test.
        n_validation_persons: number of persons whose series are for validation, 1 to 20.
        seed: seed of the choice of these persons.

    Source: Anguita and others (2013) for the data; Kusupati and others (2018, arXiv:1901.02358), FastGRNN,
    for the groups. coRNN (Rusch and Mishra 2021, arXiv:2010.00951) has the same task; its released code reads
    a validation split that is not published.

    Example:
        >>> task = Har2(path=Path("UCI HAR Dataset"))
        >>> task.n_features, task.n_outputs, task.chance
        (9, 2, 0.5)
    """

    n_validation_persons: int = 3
    seed: int = 0
    vocab_size: ClassVar[int | None] = None
    n_features: ClassVar[int | None] = len(SIGNALS)
    n_outputs: ClassVar[int] = 2
    least: ClassVar[Mapping[str, int]] = {"n_validation_persons": 1, "seed": 0}
    wanted: ClassVar[str] = (
        "Download the data of https://archive.ics.uci.edu/dataset/240/"
        "human+activity+recognition+using+smartphones, unpack the archive in it too, and pass the folder "
        "UCI HAR Dataset with --data.path."
    )

    def read(self) -> dict[SplitName, LabelledSeries]:
        """Read the files, and return all splits."""
        folder = self.folder()
        values, labels, persons = self._part(folder, "train")
        names = np.unique(persons)
        if self.n_validation_persons >= len(names):
            raise DataError(
                f"`n_validation_persons` must be less than the {len(names)} persons of {folder / 'train'}; "
                f"got {self.n_validation_persons}."
            )
        held_out = np.random.default_rng(self.seed).choice(names, self.n_validation_persons, replace=False)
        validates = np.isin(persons, held_out)
        known = values[~validates].reshape(-1, len(SIGNALS)).astype(np.float64)
        mean, std = (torch.from_numpy(number).float()[None] for number in (known.mean(0), known.std(0)))

        def split(values: NDArray[np.float32], labels: NDArray[np.int64]) -> LabelledSeries:
            return LabelledSeries(torch.from_numpy(values), torch.from_numpy(labels), mean, std)

        return {
            "train": split(values[~validates], labels[~validates]),
            "validation": split(values[validates], labels[validates]),
            "test": split(*self._part(folder, "test")[:2]),
        }

    def _part(
        self, folder: Path, part: str
    ) -> tuple[Float[np.ndarray, "n t f"], Int64[np.ndarray, "n"], Int64[np.ndarray, "n"]]:
        """Return the series of a part of the data, their classes and their persons."""
        numbers = [self._table(folder / part / f"{name}_{part}.txt", 1) for name in ("y", "subject")]
        activities, persons = (table[:, 0].astype(np.int64) for table in numbers)
        if not np.isin(activities, range(1, len(GROUPS) + 1)).all():
            path = folder / part / f"y_{part}.txt"
            raise DataError(f"{path} must have activities from 1 to 6. It is damaged: unpack it again.")
        signals = [
            self._table(folder / part / "Inertial Signals" / f"{name}_{part}.txt", STEPS) for name in SIGNALS
        ]
        if len(sizes := {len(table) for table in [*numbers, *signals]}) > 1:
            raise DataError(
                f"the files in {folder / part} must have equally many lines; got {sorted(sizes)}. They are "
                "truncated: unpack them again."
            )
        return np.stack(signals, axis=-1), np.array(GROUPS)[activities - 1], persons

    def _table(self, path: Path, columns: int) -> NDArray[np.float32]:
        """Return the numbers of a file, whose lines have equally many, separated by spaces."""
        if not path.is_file():
            raise DataError(f"{path} does not exist. {self.wanted}")
        try:
            table = np.loadtxt(path, dtype=np.float32, ndmin=2)
        except (OSError, ValueError) as error:
            raise DataError(f"{path} is damaged: {error}. Unpack it again.") from error
        if table.shape[1] != columns or not np.isfinite(table).all():
            raise DataError(
                f"{path} must have {columns} finite numbers in each line; it has {table.shape[1]}. It is "
                "damaged: unpack it again."
            )
        return table
