"""Tables of runs: two files of JSON lines in place of a folder per run.

rows.jsonl     a line per run: folder, configuration, provenance and result; of a suite also job and outcome
curves.jsonl   a line per run: the logged numbers over the steps, by split

Both files have the same runs in the same order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypedDict

from linrec.field_types import check_content, check_types
from linrec.files import inside, json_line, parse_json, reason, replacing
from linrec.lab.report.perplexity import CURE, FILE, Perplexity
from linrec.lab.report.sample import SAMPLE, check_sample
from linrec.lab.train import RunFolderError
from linrec.lab.train.records import check_metrics
from linrec.lab.train.run import Records, checked

__all__ = ["CURVES", "ROWS", "RUN", "Stored", "check_job", "has_table", "read_table", "write_table"]

ROWS = "rows.jsonl"
CURVES = "curves.jsonl"
RUN = "run"
POINTS = 200
"""Points of the curves of a run, over all splits."""
DIGITS = 7
"""Significant digits of the numbers in curves: float32 has no more."""

AGAIN = "Make the table again with `linrec report --collect`."
# fields of a job that the configuration of its run repeats
REPEATED = ("command", "config")


class _Model(TypedDict):
    mixer_args: dict[str, Any]
    d_model: int


class _Optim(TypedDict):
    lr: float


class _Config(TypedDict):
    model: _Model
    optim: _Optim


class Job(TypedDict):
    """The fields of `job.json` that readers rely on."""

    task: str
    mixer: str
    seed: int
    trial: str
    parameters: int | None
    state_size: int | None
    metric: Literal["accuracy", "mse", "perplexity"]
    command: str
    config: _Config


class _Peak(TypedDict):
    device: int | None
    process: int


class _Speed(TypedDict):
    length: int
    tokens_per_second: float | None
    step_bytes: int | None


class _Outcome(TypedDict):
    status: str
    message: str
    peak_bytes: _Peak | None


class Outcome(_Outcome, total=False):
    """The fields of `outcome.json` that readers rely on; a job that failed lacks those below."""

    chance: float | None
    trivial_score: float | None
    state_elements: int | None
    speed_by_length: list[_Speed] | None


@dataclass(frozen=True)
class Stored:
    """A run as files hold it, before its configuration is parsed.

    Attributes:
        folder: the run folder, or the folder of the job. A run of a table need not have a folder.
        records: the contents of the run folder; None for a job without a readable run.
        job: contents of `job.json`; None for a run that `linrec bench` did not start.
        outcome: contents of `outcome.json`; None while the job has not ended.
        extra: JSON that other commands left beside the run, by name.
        problem: why there are no records.
    """

    folder: Path
    records: Records | None
    job: dict[str, Any] | None = None
    outcome: dict[str, Any] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""

    @property
    def path(self) -> Path:
        """The run folder."""
        return self.folder if self.job is None else self.folder / RUN

    @property
    def lost(self) -> bool:
        """Whether the job ended well and its run cannot be read."""
        return self.records is None and (self.outcome or {}).get("status") == "done"


def has_table(folder: Path) -> bool:
    """Return whether a folder holds a table."""
    return (folder / ROWS).is_file() and (folder / CURVES).is_file()


def write_table(runs: Sequence[tuple[str, Stored]], out: Path) -> tuple[Path, Path]:
    """Write `rows.jsonl` and `curves.jsonl`, and return their paths.

    Args:
        runs: the name of each run, a relative path with slashes, and the run.
        out: folder of the table.

    Raises:
        RunFolderError: the folder cannot be written to.
    """
    rows, curves = out / ROWS, out / CURVES
    try:
        out.mkdir(parents=True, exist_ok=True)
        # both files or neither
        with replacing(rows) as rows_partial, replacing(curves) as curves_partial:
            rows_partial.write_text("".join(_line(_row(name, run)) for name, run in runs), encoding="utf-8")
            curves_partial.write_text("".join(_line(_curves(name, run)) for name, run in runs))
    except OSError as error:
        raise RunFolderError(f"could not write the table to {out}: {reason(error)}.") from error
    return rows, curves


def read_table(folder: Path) -> list[Stored]:
    """Return the runs of a table, in order.

    Raises:
        RunFolderError: the table cannot be read, or its files do not belong together.
    """
    rows, curves = _lines(folder / ROWS), _lines(folder / CURVES)
    names = [row["folder"] for row in rows]
    if names != [curve["folder"] for curve in curves]:
        raise RunFolderError(f"{folder / ROWS} and {folder / CURVES} have other runs. {AGAIN}")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise RunFolderError(f"{folder / ROWS} has the run {twice!r} twice. {AGAIN}")
    return [_stored(folder, row, curve) for row, curve in zip(rows, curves, strict=True)]


def check_job(path: Path, job: Any, outcome: Any) -> None:
    """Refuse a job or an outcome that lacks a field.

    Raises:
        RunFolderError: a field is missing or has another type.
    """
    for content, kind in ((job, Job), (outcome, Outcome)):
        if content is not None:
            check_content(path, content, kind)


def _line(content: dict[str, Any]) -> str:
    return json_line(content, separators=(",", ":"))


def _row(name: str, run: Stored) -> dict[str, Any]:
    """Return the line of a run; provenance that the result or the job repeats is left out."""
    row: dict[str, Any] = {"folder": name}
    known: dict[str, Any] = {}
    if run.records is not None:
        known = {**run.records.about, "config": run.records.config}
    if run.job is not None:
        repeated = {key for key in REPEATED if key in known and known[key] == run.job[key]}
        row |= {"job": {key: value for key, value in run.job.items() if key not in repeated}}
        row |= {"outcome": run.outcome}
    if run.records is not None:
        result = run.records.result
        if result is not None:
            result = {key: value for key, value in result.items() if key not in known or known[key] != value}
        row |= {**known, "result": result}
    return row | ({"extra": dict(run.extra)} if run.extra else {})


def _curves(name: str, run: Stored) -> dict[str, Any]:
    """Return the logged numbers of a run by split, a list per quantity; null stands for a missing number."""
    metrics = [] if run.records is None else run.records.metrics
    curves = {}
    splits = dict.fromkeys(record["split"] for record in metrics)
    for split in splits:
        records = [record for record in metrics if record["split"] == split]
        if len(metrics) > POINTS:
            n = len(records)
            kept = 1 + (POINTS - len(splits)) * n // len(metrics)
            # counted from the last point, which stays
            records = [records[n - 1 - place * n // kept] for place in reversed(range(kept))]
        quantities = dict.fromkeys(key for record in records for key in record if key != "split")
        curves[split] = {key: [_rounded(record.get(key)) for record in records] for key in quantities}
    return {"folder": name, "curves": curves}


def _rounded(value: Any) -> Any:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines, each with a relative path as "folder"."""
    try:
        lines = inside(path).read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path} cannot be read: {reason(error)}.") from error
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            content = parse_json(line)
            check_types({"the line": dict}, {"the line": content})
            check_types({"folder": str}, {"folder": content.get("folder")})
        except (TypeError, ValueError) as error:
            raise RunFolderError(f"line {number} of {path} cannot be used: {error}") from error
        name = PurePosixPath(content["folder"])
        # weights are read from there where the folder exists
        if name.is_absolute() or ".." in name.parts:
            raise RunFolderError(
                f"line {number} of {path} cannot be used: `folder` must be a path below the table; "
                f"got {content['folder']!r}."
            )
        found.append(content)
    return found


def _stored(table: Path, row: dict[str, Any], curve: dict[str, Any]) -> Stored:
    row = dict(row)
    folder = table / row.pop("folder")
    job, outcome, extra = row.pop("job", None), row.pop("outcome", None), row.pop("extra", {})
    if not isinstance(job, dict | None) or not isinstance(extra, dict):
        raise RunFolderError(f"the row of {folder} cannot be used: `job` and `extra` must be objects.")
    if job is not None:
        job = {**{key: row[key] for key in REPEATED if key in row}, **job}
    check_job(folder, job, outcome)
    if "perplexity" in extra:
        check_content(folder / FILE, extra["perplexity"], Perplexity, CURE)
    if SAMPLE in extra:
        check_sample(extra[SAMPLE], folder)
    if "config" not in row:
        if job is None:
            raise RunFolderError(f"the row of {folder} cannot be used: it has no configuration.")
        return Stored(folder, None, job, outcome, extra, f"there is no run folder {folder / RUN}.")
    config, result = row.pop("config"), row.pop("result", None)
    if not isinstance(result, dict | None):
        raise RunFolderError(f"the row of {folder} cannot be used: `result` must be an object or null.")
    try:
        metrics = check_metrics(_metrics(curve.get("curves")), "its curves")
    except (AttributeError, TypeError, ValueError) as error:
        raise RunFolderError(f"the curves of {folder} cannot be used: {error}") from error
    return Stored(folder, checked(folder, Records(config, row, metrics, result)), job, outcome, extra)


def _metrics(curves: Any) -> list[dict[str, Any]]:
    """Return the records of a run in the order in which training logs them."""
    records = []
    for split, quantities in curves.items():
        for values in zip(*quantities.values(), strict=True):
            numbers = {key: value for key, value in zip(quantities, values, strict=True) if value is not None}
            records.append({"split": split, **numbers})
    # a window of training is logged before the evaluation at its end
    return sorted(records, key=lambda record: (record.get("step", 0), record["split"] != "train"))
