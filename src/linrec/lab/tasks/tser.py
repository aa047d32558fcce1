"""TSER: estimate a number from a multivariate time series, such as a heart rate from BIDMC.

Source: Tan and others (2020, arXiv:2006.10996), the archive of time series extrinsic regression of Monash,
UEA and UCR. Its data sets BIDMC32RR, BIDMC32HR and BIDMC32SpO2 have 7,949 series of 4,000 steps: two signals,
over 32 seconds. UnICORNN and LEM (Rusch and others, 2021 and 2022) pool both files and split them again.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor

from linrec.lab.tasks.base import ObjectiveName, errors_of_numbers
from linrec.lab.tasks.labelled_series import LabelledSeries
from linrec.lab.tasks.ts_archive import TsArchive

__all__ = ["Tser"]


@dataclass(frozen=True, kw_only=True)
class Tser(TsArchive):
    """Estimate a number from a multivariate time series, with any regression data set of the archive.

        target = number, given x_1, ..., x_t of f numbers each

    Targets have the unit of the file, and inputs are normalised. See `TsArchive` for the files, their splits
    and the fields.

    The series of BIDMC are windows of 53 recordings of 8 minutes. So they overlap, and in pooled splits,
    test series contain steps of training series. Errors are errors for known recordings.

    Source: Tan and others (2020) for the data; UnICORNN and LEM for pooled splits of 70%, 15% and 15%.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
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

        Raises:
            ValueError: `predictions` has another shape than the targets.
            TypeError: `predictions` is not a real-valued tensor.
        """
        errors = errors_of_numbers(predictions, split)
        assert errors["mse"] is not None
        return {**errors, "rmse": math.sqrt(errors["mse"])}
