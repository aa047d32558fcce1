"""Trained runs, read from run folders, from the jobs of `linrec bench`, or from tables of runs."""

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from linrec.errors import nearest
from linrec.files import read_json, reason
from linrec.lab.report.perplexity import read_perplexity
from linrec.lab.report.tables import CURVES, ROWS, RUN, Stored, check_job, has_table, read_table
from linrec.lab.train import Run, RunFolderError
from linrec.lab.train.run import CONFIG, read_records, run_of

__all__ = ["read_job", "read_record", "read_runs", "read_stored"]

JOB = "job.json"
OUTCOME = "outcome.json"
# written by `examples/distillation.py`
DISTILLATION = "distillation.json"


def read_runs(paths: Iterable[str | os.PathLike[str]], *, trust_code: bool = False) -> list[Run]:
    """Return the runs of run folders and tables; a job that has not begun has no run.

    Args:
        paths: see `read_stored`.
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
    """Return the runs of run folders and tables, each run once, without parsing their configurations.

    A path is a run folder, the folder of a job, a table, a folder of these, or a name within a table:
    `results/memory-horizon/ablations` are the runs of the table `results/memory-horizon` whose names begin
    with `ablations/`. In a folder that has a table, run folders are not looked for.

    Args:
        paths: where the runs are.

    Raises:
        RunFolderError: a path has no runs, or a file is damaged.
    """
    found: dict[Path, Stored] = {}
    for path in map(Path, paths):
        try:
            for stored in _read(path):
                found.setdefault(stored.path.resolve(), stored)
        except OSError as error:
            raise RunFolderError(f"{error.filename or path} cannot be read: {reason(error)}.") from error
    return list(found.values())


def read_job(folder: Path) -> Stored:
    """Return the run of a job of `linrec bench`, with job and outcome.

    Raises:
        RunFolderError: job or outcome cannot be read.
    """
    job = read_record(folder / JOB)
    outcome = read_record(folder / OUTCOME) if (folder / OUTCOME).exists() else None
    check_job(folder, job, outcome)
    try:
        return Stored(folder, read_records(folder / RUN), job, outcome, _extra(folder / RUN))
    except RunFolderError as error:
        return Stored(folder, None, job, outcome, problem=str(error))


def _read(path: Path) -> list[Stored]:
    if not _is_one(path):
        if has_table(path):
            return read_table(path)
        if below := list(_below(path)):
            return below
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


def _below(folder: Path) -> Iterator[Stored]:
    """Yield the runs below a folder, in the order of their names and of the numbers in them."""
    if not folder.is_dir():
        return
    for child in sorted(folder.iterdir(), key=_in_parts):
        if _is_one(child):
            yield _read_one(child)
        elif has_table(child):
            yield from read_table(child)
        elif child.is_dir() and not child.is_symlink():
            yield from _below(child)


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
    extra: dict[str, Any] = {}
    if (perplexity := read_perplexity(folder)) is not None:
        extra["perplexity"] = perplexity
    if (folder / DISTILLATION).exists():
        extra["distillation"] = read_record(folder / DISTILLATION)
    return extra


def read_record(path: Path) -> Any:
    """Return the content of a JSON file; raise RunFolderError if it is damaged."""
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path} cannot be read: {reason(error)}.") from error
