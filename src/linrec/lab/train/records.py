"""Records of a run: metrics as JSON lines and TensorBoard event files; result; provenance."""

import contextlib
import platform
import subprocess
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from typing_extensions import TypedDict

from linrec.errors import TrainError
from linrec.files import append_to, force_to_disk, json_line, make_subfolder, parse_json, reason, write_text
from linrec.lab.train.fabric import program
from linrec.rules import check_integers

METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"
PACKAGES = ("linrec", "torch", "triton", "numba", "numpy", "lightning-fabric", "lightning", "safetensors")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the logged records of a run folder in order, without an incomplete last line.

    Raises ValueError if a line is damaged, or is not a record; see `check_metrics`.
    """
    try:
        *lines, rest = (folder / METRICS).read_bytes().split(b"\n")
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
            raise ValueError(f"line {number} of {METRICS}: {error}") from error
    return check_metrics(records, METRICS)


def check_metrics(records: list[Any], name: str) -> list[dict[str, Any]]:
    """Return the records of a file if each has a step, a split and numbers otherwise; or raise ValueError."""
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
    """Appends records to `metrics.jsonl`, which has `records` records, and to TensorBoard; a context manager.

    Records of later steps than `step` are dropped; they exist if the run stopped between two checkpoints.
    `command` is the command that resumes the run, for errors.
    """

    def __init__(self, folder: Path, *, step: int, command: str = "train") -> None:
        # imported here because the import takes a second, which commands without a log should not pay
        from torch.utils.tensorboard import SummaryWriter

        self._path, self._command = folder / METRICS, command
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
        """Write a record with "step", "split" and numbers."""
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
            f"make room and continue with: {' '.join(program())} {self._command} --resume "
            f"{self._path.parent}"
        )


class SpanCurve(TypedDict):
    """Accuracies by the memory that an answer needs, in bins of equal width; None for an empty bin."""

    width: int
    accuracy: list[float | None]
    count: list[int]


class Scores(TypedDict, total=False):
    """The scores of a split that readers rely on; tasks have further scores."""

    loss: float | None
    accuracy: float | None
    nrmse: float | None
    span_curve: SpanCurve


class StoredResult(TypedDict, total=False):
    """The types of the fields of `result.json`; results of older versions lack newer fields."""

    test: Scores
    validation: Scores
    parameters: int
    steps: int
    seconds: float
    steps_per_second: float
    probes: dict[str, Scores]
    best_step: int | None


@dataclass(frozen=True)
class Result:
    """The result of a run, as stored in `result.json` beside configuration and provenance.

    Args:
        test: scores on the test split: "loss" in nats and "accuracy", or for a regression "loss", the mean
            squared error; and further scores of the task. Empty if the split is empty.
        validation: scores on the validation split.
        parameters: number of parameters of the model.
        steps: number of steps made.
        seconds: wall time of the whole run in seconds, including evaluation and the time before a resume.
        steps_per_second: median speed of training, without evaluation.
        probes: scores on each of the task's probes, such as longer samples, by name.
        best_step: the step of the lowest validation loss, if the scores are of its model; None if the scores
            are of the last step's model.
    """

    test: dict[str, Any]
    validation: dict[str, Any]
    parameters: int
    steps: int
    seconds: float
    steps_per_second: float
    probes: dict[str, dict[str, Any]] = field(default_factory=dict)
    best_step: int | None = None


class Device(TypedDict, total=False):
    """The device of a run."""

    type: str
    name: str
    threads: int


class Part(TypedDict):
    """A part of a run that was resumed: its first step, and fields of the provenance that changed."""

    step: int


class About(TypedDict, total=False):
    """The types of the fields of config.json beside the configuration."""

    recipe: str | None
    command: str | None
    total_steps: int
    commit: str | None
    dirty: bool | None
    versions: dict[str, str]
    device: Device
    tokenizer: str
    processes: int
    resumed: list[Part]


def provenance(device: torch.device) -> dict[str, Any]:
    """Return the commit, the versions and the device of a run, as JSON values.

    "commit" and "dirty" (whether tracked files have changes) are None outside of a git checkout of linrec.
    """
    commit, dirty = _commit()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = _processor() or platform.processor() or platform.machine()
    described = {"type": device.type, "name": name, "threads": torch.get_num_threads()}
    return {"commit": commit, "dirty": dirty, "versions": _versions(), "device": described}


def _commit() -> tuple[str | None, bool | None]:
    package = Path(__file__).resolve().parents[1]

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(package), *arguments], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        # an installed linrec may be inside the git checkout of another project, which does not track it
        git("ls-files", "--error-unmatch", "__init__.py")
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return None, None


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    # not every torch has its build ("+cpu", "+cu130") in the package metadata
    versions["torch"] = str(torch.__version__)
    return versions


def _processor() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)
