"""UEA: classify multivariate time series, from any data set of the UEA and UCR archives.

Source: Bagnall and others (2018), arXiv:1811.00075, for the archive; its data set EigenWorms has 259 series
of 17,984 steps. Walker and others (2024), arXiv:2402.18512, pool both files and split them again.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from jaxtyping import Int64
from torch import Tensor

from linrec.lab.tasks.base import scores_by_class
from linrec.lab.tasks.classification import ClassificationTask, LabelledSource
from linrec.lab.tasks.ts_archive import TsArchive

__all__ = ["Uea"]


@dataclass(frozen=True, kw_only=True)
class Uea(TsArchive, ClassificationTask):
    """Classify multivariate time series of a UEA or UCR data set.

        target = class, given x_1, ..., x_t of f numbers each

    See `TsArchive` for the files, their splits and the other fields.

    Args:
        n_classes: number of classes; None reads it from the files.

    Raises:
        ValueError: a field is out of range.

    Source: Walker and others (2024) for pooled splits without exact duplicates; their five seeds give other
    splits than the same seeds in this task.

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
