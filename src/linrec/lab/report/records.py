"""Records of trained runs: the one schema of rows and curves, and how they are read and written.

A run is a folder of `linrec train`, a job of `linrec bench`, or a row of a table. A table is two files of
JSON lines with the same runs in the same order:

rows.jsonl     `Row`: folder, configuration, provenance and result of a run; of a suite also job and outcome
curves.jsonl   the logged numbers over the steps, by split
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from typing_extensions import NotRequired, TypedDict

from linrec.errors import nearest
from linrec.field_types import check_content, check_types, read_content
from linrec.files import inside, json_line, parse_json, read_json, reason, replacing
from linrec.lab.evaluation.write import PERPLEXITY
from linrec.lab.train import Run, RunFolderError
from linrec.lab.train.records import About, StoredResult, check_metrics
from linrec.lab.train.run import CONFIG, Records, read_records, run_of

ROWS = "rows.jsonl"
CURVES = "curves.jsonl"
JOB = "job.json"
OUTCOME = "outcome.json"
RUN = "run"
EXTRA = "extra-"
"""Beginning of the names of JSON files with further numbers of a run; the rest is their name in `extra`."""

POINTS = 200
"""Points of the curves of a run, over all splits."""
DIGITS = 7
"""Significant digits of the numbers in curves: float32 has no more."""
REPEATED = ("command", "config")
"""Fields of a job that the row of its run has itself."""
AGAIN = "Make the table again with `linrec report --collect`."


class _Model(TypedDict):
    mixer_args: dict[str, Any]
    d_model: int


class _Optim(TypedDict):
    lr: float


class _Training(TypedDict):
    model: _Model
    optim: _Optim


class _Learning(TypedDict):
    stream: str
    mixer_args: dict[str, Any]
    d_model: int
    lr: float
    rows: int


class _Recovery(TypedDict):
    steps: int


class _Return(TypedDict):
    retained: float | None


class Learnt(TypedDict):
    """The fields of `result.json` of `linrec learn` that readers rely on."""

    loss: float | None
    fading: float | None
    regimes: list[list[Any]]
    recoveries: list[_Recovery]
    forgotten: list[_Return]
    bounds: dict[str, float]
    memory_bytes: int
    microseconds_per_step: float


class JobRecord(TypedDict):
    """The fields of `job.json` that readers rely on."""

    task: str
    mixer: str
    seed: int
    trial: str
    parameters: int | None
    state_size: int | None
    metric: Literal["accuracy", "auc", "mse", "perplexity", "loss"]
    command: str
    config: dict[str, Any]


class _Peak(TypedDict):
    device: int | None
    process: int


class _Speed(TypedDict):
    length: int
    tokens_per_second: float | None
    step_bytes: int | None


class Outcome(TypedDict):
    """The fields of `outcome.json` that readers rely on; a job that failed lacks measurements."""

    status: str
    message: str
    peak_bytes: _Peak | None
    chance: NotRequired[float | None]
    trivial_score: NotRequired[float | None]
    state_elements: NotRequired[int | None]
    speed_by_length: NotRequired[list[_Speed] | None]


class _Score(TypedDict):
    length: int | None
    perplexity: float | None
    word_perplexity: float | None
    byte_perplexity: float | None
    bits_per_byte: float | None


class Perplexity(TypedDict):
    """The fields of `perplexity.json` that readers rely on; a length of None stands for a carried state."""

    data: str
    trained_length: int
    scores: list[_Score]
    split: NotRequired[str | None]
    command: NotRequired[str | None]


class Sample(TypedDict):
    """A text that a language model wrote, and how; the text may have control characters."""

    text: Any
    prompt: str
    temperature: float
    seed: int


class Extra(TypedDict, total=False):
    """JSON that other commands left beside a run, by name; further names may have any value."""

    perplexity: Perplexity
    sample: Sample


class Row(About, total=False):
    """A line of `rows.jsonl`, with the configuration in `config`; a job that has not begun has no result."""

    job: JobRecord | None
    outcome: Outcome | None
    result: StoredResult | None
    extra: Extra


@dataclass(frozen=True)
class Stored:
    """A run as files hold it, before its configuration is parsed; `problem` is why records are None."""

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


def read_runs(paths: Iterable[str | os.PathLike[str]], *, trust_code: bool = False) -> list[Run]:
    """Return the runs of run folders and tables; a job that has not begun has no run.

    Args:
        paths: run folders, folders of jobs, tables, folders of these, or names within a table:
            `results/memory-horizon/ablations` are the runs of the table `results/memory-horizon` whose names
            begin with `ablations/`. `rows.jsonl` alone has no curves. A run counts once.
        trust_code: whether to import tasks and mixers that the runs name by import paths; see `load_run`.

    Raises:
        RunFolderError: a path has no runs, or a run cannot be read.
        UntrustedCodeError: a configuration names a mixer by an import path that is not trusted.
    """
    runs = []
    for stored in read_stored(paths):
        if stored.lost:
            raise RunFolderError(stored.problem)
        if stored.records is not None:
            runs.append(run_of(stored.path, stored.records, trust_code=trust_code, extra=stored.extra))
    return runs


def read_stored(paths: Iterable[str | os.PathLike[str]]) -> list[Stored]:
    """Return the runs of `read_runs` and the jobs without a run, without parsing their configurations."""
    found: dict[Path, Stored] = {}
    for path in map(Path, paths):
        try:
            for stored in _read(path):
                found.setdefault(stored.path.resolve(), stored)
        except OSError as error:
            raise RunFolderError(f"{error.filename or path} cannot be read: {reason(error)}.") from error
    return list(found.values())


def read_job(folder: Path) -> Stored:
    """Return the run of a job of `linrec bench`; raise RunFolderError if job or outcome cannot be read."""
    job, outcome = read_content(folder / JOB, JobRecord), read_content(folder / OUTCOME, Outcome)
    if job is None:
        raise RunFolderError(f"{folder} is no job of linrec bench: it has no {JOB}.")
    _check_config(folder / JOB, job)
    try:
        return Stored(folder, read_records(folder / RUN), job, outcome, _extra(folder / RUN))
    except RunFolderError as error:
        return Stored(folder, None, job, outcome, problem=str(error))


def learns(config: Any) -> bool:
    """Return whether a configuration, JSON as it was read, is of `linrec learn`."""
    return isinstance(config, dict) and "stream" in config


def read_perplexity(folder: Path) -> dict[str, Any] | None:
    """Return the content of `perplexity.json`, or None without it; raise RunFolderError if damaged."""
    return read_content(folder / PERPLEXITY, Perplexity, "Delete it, or evaluate again.")


def has_table(folder: Path) -> bool:
    """Return whether a folder holds a table."""
    return (folder / ROWS).is_file() and (folder / CURVES).is_file()


def read_table(folder: Path) -> list[Stored]:
    """Return the runs of a table, in order; raise RunFolderError if the files do not fit together."""
    rows, curves = _lines(folder / ROWS), _lines(folder / CURVES)
    names = [row["folder"] for row in rows]
    if names != [curve["folder"] for curve in curves]:
        raise RunFolderError(f"{folder / ROWS} and {folder / CURVES} have other runs. {AGAIN}")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise RunFolderError(f"{folder / ROWS} has the run {twice!r} twice. {AGAIN}")
    return [_stored(folder, row, curve.get("curves")) for row, curve in zip(rows, curves, strict=True)]


def read_rows(path: Path) -> list[Stored]:
    """Return the runs of `rows.jsonl` alone, without curves; errors are those of `read_table`."""
    return [_stored(path.parent, row, {}) for row in _lines(path)]


def write_table(runs: Sequence[tuple[str, Stored]], out: Path) -> tuple[Path, Path]:
    """Write `rows.jsonl` and `curves.jsonl` of runs, named by relative paths with slashes."""
    rows, curves = out / ROWS, out / CURVES
    out.mkdir(parents=True, exist_ok=True)
    # both files or neither
    with replacing(rows) as rows_partial, replacing(curves) as curves_partial:
        rows_partial.write_text("".join(_line(_row(name, run)) for name, run in runs), encoding="utf-8")
        curves_partial.write_text("".join(_line(_curves(name, run)) for name, run in runs))
    return rows, curves


def _read(path: Path) -> list[Stored]:
    if path.name == ROWS and not path.is_dir():
        return read_table(path.parent) if has_table(path.parent) else read_rows(path)
    if not _is_one(path):
        if found := _runs(path):
            return list(found.values())
        if within := _within_table(path):
            return within
        for name, other in ((ROWS, CURVES), (CURVES, ROWS)):
            if (path / name).exists():
                raise RunFolderError(f"{path} is no table of runs: it has {name}, and no {other} beside it.")
    return [_read_one(path)]


def _read_one(folder: Path) -> Stored:
    if (folder / JOB).exists():
        return read_job(folder)
    return Stored(folder, read_records(folder), extra=_extra(folder))


def _is_one(folder: Path) -> bool:
    """Return whether a folder is a job or a run; models of other libraries have a `config.json` too."""
    if (folder / JOB).exists():
        return True
    if not (folder / CONFIG).exists():
        return False
    try:
        content = read_json(folder / CONFIG)
    except ValueError:
        # a damaged run, which must not be skipped
        return True
    return not isinstance(content, dict) or "config" in content


def _runs(folder: Path) -> dict[Path, Stored]:
    """Return the runs of a folder: those of its table, then those of folders below it.

    Folders come in the order of their names and of the numbers in them. A folder of a run in the table, such
    as a job of a suite, is newer than its row.
    """
    found = {run.folder: run for run in read_table(folder)} if has_table(folder) else {}
    if not folder.is_dir():
        return found
    for child in sorted(folder.iterdir(), key=_in_parts):
        if _is_one(child):
            found[child] = _read_one(child)
        elif child.is_symlink():
            found |= {run.folder: run for run in read_table(child)} if has_table(child) else {}
        else:
            found |= _runs(child)
    return found


def _in_parts(path: Path) -> tuple[list[str | float], str]:
    """Return the name of a path as letters and numbers in turns: "lr-10" comes after "lr-9.5"."""
    parts = enumerate(re.split(r"(\d+(?:\.\d+)?)", path.name))
    return [float(part) if place % 2 else part for place, part in parts], path.name


def _within_table(path: Path) -> list[Stored]:
    """Return the runs that a table above a path has at or below that name."""
    for table in path.parents:
        if has_table(table):
            runs = read_table(table)
            within = [run for run in runs if path in (run.folder, run.path, *run.folder.parents)]
            if not within:
                close = nearest(str(path), [str(run.folder) for run in runs]) if runs else table
                raise RunFolderError(f"the table in {table} has no run {path}; did you mean {close}?")
            return within
    return []


def _extra(folder: Path) -> dict[str, Any]:
    files = sorted(folder.glob(f"{EXTRA}*.json"))
    extra: dict[str, Any] = {path.stem.removeprefix(EXTRA): read_content(path, Extra) for path in files}
    check_content(folder, extra, Extra)
    perplexity = read_perplexity(folder)
    return extra if perplexity is None else {**extra, "perplexity": perplexity}


def _check_config(path: Path, job: Mapping[str, Any], cure: str = "") -> None:
    """Raise RunFolderError unless a job has the fields of its configuration that readers rely on."""
    check_content(path, job["config"], _Learning if learns(job["config"]) else _Training, cure)


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
            name = PurePosixPath(content["folder"])
            # weights are read from there where the folder exists
            if name.is_absolute() or ".." in name.parts:
                raise ValueError(f"`folder` must be a path below the table; got {content['folder']!r}.")
        except (TypeError, ValueError) as error:
            raise RunFolderError(f"line {number} of {path} cannot be used: {error}") from error
        found.append(content)
    return found


def _stored(table: Path, row: dict[str, Any], curves: Any) -> Stored:
    folder = table / row["folder"]
    if "status" in row:
        raise RunFolderError(
            f"{folder} cannot be used: its row is of an earlier version; give the folder of the suite."
        )
    if isinstance(row.get("job"), dict):
        row = {**row, "job": {**{key: row[key] for key in REPEATED if key in row}, **row["job"]}}
    about = dict(check_content(folder, row, Row, AGAIN))
    job, outcome, extra = about.pop("job", None), about.pop("outcome", None), about.pop("extra", {})
    if job is not None:
        _check_config(folder, job, AGAIN)
    if "config" not in row:
        if job is None:
            raise RunFolderError(f"{folder} cannot be used: its row has no configuration.")
        return Stored(folder, None, job, outcome, extra, f"there is no run folder {folder / RUN}.")
    del about["folder"]
    config, result = about.pop("config"), about.pop("result", None)
    try:
        metrics = check_metrics(_metrics(curves), "its curves")
    except (AttributeError, TypeError, ValueError) as error:
        raise RunFolderError(f"the curves of {folder} cannot be used: {error}") from error
    return Stored(folder, Records(config, about, metrics, result), job, outcome, extra)


def _metrics(curves: Any) -> list[dict[str, Any]]:
    """Return the records of a run in the order in which training logs them."""
    records = []
    for split, quantities in curves.items():
        for values in zip(*quantities.values(), strict=True):
            numbers = {key: value for key, value in zip(quantities, values, strict=True) if value is not None}
            records.append({"split": split, **numbers})
    # a window of training is logged before the evaluation at its end
    return sorted(records, key=lambda record: (record.get("step", 0), record["split"] != "train"))
