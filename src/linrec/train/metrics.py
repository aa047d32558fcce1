"""The log of a run: one JSON object per line for programs, TensorBoard event files for eyes."""

import contextlib
import json
from pathlib import Path
from types import TracebackType
from typing import Any

from linrec.errors import TrainError
from linrec.files import append_to, make_subfolder, parse_json, reason, write_text
from linrec.train.processes import program

FILE = "metrics.jsonl"
TENSORBOARD = "tensorboard"


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the logged records of a run folder in order; a last line that was cut off is left out.

    Args:
        folder: the run folder.

    Raises:
        ValueError: a line is no JSON object with a step and a split.
    """
    try:
        lines = (folder / FILE).read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    # whole lines end in a newline, so what follows the last one is empty or was cut off
    return check_metrics([parse_json(line) for line in lines[:-1]], FILE)


def check_metrics(records: list[Any], name: str) -> list[dict[str, Any]]:
    """Return the records if each has a step, a split and otherwise numbers.

    Args:
        records: one record per line.
        name: of the file, for messages.

    Raises:
        ValueError: a record is no such object.
    """
    for number, record in enumerate(records, start=1):
        if not (isinstance(record, dict) and isinstance(record.get("step"), int) and "split" in record):
            raise ValueError(
                f"line {number} of {name} must be an object with a whole number `step` and a `split`"
            )
        for key, value in record.items():
            if key != "split" and not isinstance(value, (int, float)):
                raise ValueError(f"`{key}` in line {number} of {name} must be a number; got {value!r}")
    return records


class MetricsLog:
    """Appends records to `metrics.jsonl` and TensorBoard; a context manager.

    Args:
        folder: the run folder.
        step: steps made so far; records of later steps, which a run left behind when it stopped between two
            checkpoints, are dropped.
    """

    def __init__(self, folder: Path, *, step: int) -> None:
        # imported here: it takes a second that commands which log nothing should not pay
        from torch.utils.tensorboard import SummaryWriter

        self._path = folder / FILE
        # a run that starts again drops the records of the run before
        kept = [record for record in read_metrics(folder) if record["step"] <= step] if step else []
        try:
            write_text(self._path, "".join(json.dumps(record) + "\n" for record in kept))
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
        except OSError as failure:
            # an error that is on its way says more than this one, which follows from it
            if error is None:
                raise TrainError(f"could not write {self._path}: {reason(failure)}.") from failure

    def append(self, record: dict[str, Any]) -> None:
        """Write one record: "step", "split", and numbers.

        Raises:
            TrainError: the disk is full, say.
        """
        try:
            self._file.write(json.dumps(record) + "\n")
            # a reader, or a crash right after, finds whole lines
            self._file.flush()
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
