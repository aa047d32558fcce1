"""Reader of .ts files, the format of the UEA and UCR archives of time series.

Lines that begin with # are comments. The header has lines that begin with @, up to @data. After it, each line
is a series: its dimensions, separated by colons, each with values separated by commas; and its class after
the last colon, or in an archive of regressions a number. A missing value is a question mark.
"""

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float64, Int64
from numpy.typing import NDArray

from linrec.lab.corpora.progress import ReadingDisplay
from linrec.text import DataError


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

    Raises:
        DataError: the file cannot be read, is damaged, has time stamps, or has other labels.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "Steps_TRAIN.ts"
        >>> text = "@timeStamps false\\n@classLabel true up down\\n@data\\n1,2,?:0,0,1:up\\n5,4:1,1:down\\n"
        >>> _ = path.write_text(text)
        >>> file = read_ts(path)
        >>> file.classes, file.labels.tolist(), file.series[1].tolist()
        (('up', 'down'), [0, 1], [[5.0, 1.0], [4.0, 1.0]])
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
