"""The metrics log of a run: JSON lines for programs, and TensorBoard event files."""

import contextlib
from pathlib import Path
from types import TracebackType
from typing import Any

from linrec.errors import TrainError
from linrec.files import append_to, force_to_disk, json_line, make_subfolder, parse_json, reason, write_text
from linrec.lab.train.processes import program
from linrec.rules import check_integers

FILE = "metrics.jsonl"
TENSORBOARD = "tensorboard"


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the logged records of a run folder in order, without an incomplete last line.

    Args:
        folder: the run folder.

    Raises:
        ValueError: a line is damaged, or is not a JSON object with a step and a split.
    """
    try:
        *lines, rest = (folder / FILE).read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    # a killed process leaves the beginning of a line; a line with something else than its newline is damaged
    if b"}" in rest:
        lines.append(rest)
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(parse_json(line))
        except ValueError as error:
            raise ValueError(f"line {number} of {FILE}: {error}") from error
    return check_metrics(records, FILE)


def check_metrics(records: list[Any], name: str) -> list[dict[str, Any]]:
    """Return the records if each has a step, a split and numbers otherwise.

    Args:
        records: a record per line.
        name: name of the file, for messages.

    Raises:
        ValueError: a record is not such an object.
    """
    for number, record in enumerate(records, start=1):
        if not (
            isinstance(record, dict)
            and isinstance(record.get("step"), int)
            and isinstance(record.get("split"), str)
        ):
            raise ValueError(
                f"line {number} of {name} must be an object with an integer `step` and a `split`"
            )
        for key, value in record.items():
            if key != "split" and not isinstance(value, (int, float)):
                raise ValueError(f"`{key}` in line {number} of {name} must be a number; got {value!r:.80}")
        check_integers(record)
    return records


class MetricsLog:
    """Appends records to `metrics.jsonl` and TensorBoard; a context manager.

    Args:
        folder: the run folder.
        step: number of steps made so far. Records of later steps are dropped; they exist if the run stopped
            between two checkpoints.

    Attributes:
        records: number of records in the file.
    """

    def __init__(self, folder: Path, *, step: int) -> None:
        # imported here because the import takes a second, which commands without a log should not pay
        from torch.utils.tensorboard import SummaryWriter

        self._path = folder / FILE
        # a run that starts again from step 0 drops all earlier records
        kept = [record for record in read_metrics(folder) if record["step"] <= step] if step else []
        self.records = len(kept)
        try:
            write_text(self._path, "".join(json_line(record) for record in kept))
            with contextlib.ExitStack() as opened:
                self._file = opened.enter_context(append_to(self._path))
                events = str(make_subfolder(folder, TENSORBOARD))
                self._board = opened.enter_context(
                    contextlib.closing(SummaryWriter(events, purge_step=step + 1))
                )
                self._opened = opened.pop_all()
        except OSError as error:
            raise self._unwritable(error, step) from error

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._opened.close()
            # `result.json` will state the number of records
            force_to_disk(self._path)
        except OSError as failure:
            # an error that is already being raised is the cause of this failure and says more
            if error is None:
                raise TrainError(f"could not write {self._path}: {reason(failure)}.") from failure

    def append(self, record: dict[str, Any]) -> None:
        """Write a record with "step", "split" and numbers.

        Raises:
            TrainError: the file cannot be written, for example because the disk is full.
        """
        try:
            self._file.write(json_line(record))
            # flush, so that readers see complete lines, even after a crash
            self._file.flush()
            self.records += 1
            for name, value in record.items():
                if name not in ("step", "split"):
                    self._board.add_scalar(f"{record['split']}/{name}", value, record["step"])
        except OSError as error:
            raise self._unwritable(error, record["step"]) from error

    def _unwritable(self, error: OSError, step: int) -> TrainError:
        return TrainError(
            f"could not write {error.filename or self._path} at step {step}: {reason(error)}; "
            f"make room and continue with: {' '.join(program())} train --resume {self._path.parent}"
        )
