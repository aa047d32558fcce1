"""From run folders to a table."""

import dataclasses
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from linrec.lab.report.sample import SAMPLE, has_weights, is_language_model, sample_text
from linrec.lab.report.stored import read_stored
from linrec.lab.report.tables import CURVES, ROWS, Stored, write_table
from linrec.lab.train import RunFolderError
from linrec.lab.train.run import run_of

__all__ = ["collect_runs"]


def collect_runs(
    paths: Iterable[str | os.PathLike[str]], out: str | os.PathLike[str], *, trust_code: bool = False
) -> tuple[Path, Path]:
    """Write a table of runs: `rows.jsonl` and `curves.jsonl`, with a line per run in each.

    Reports read a table as they read the run folders, which stay as they are. The table has no weights; of a
    language model with weights it keeps a sample text. Curves have at most 200 points a run, rounded to 7
    significant digits.

    A run that several paths have is in the table once: the copy that has finished, else the copy of most
    steps, else the copy that was given first. Runs are copies if they have one configuration and seed, and
    either one name below their paths, or one commit, device and versions.

    Args:
        paths: run folders, folders of these, such as those of `linrec bench`, or tables. A run is named by
            its path below the folder that all paths have in common.
        out: folder for the table. The runs of a table that it has come first, under their names.
        trust_code: whether to import mixers that language models with weights name by import paths.

    Returns:
        The paths of both files.

    Raises:
        RunFolderError: a path has no runs, a run cannot be read, two runs have one name, or the table cannot
            be written.
        CheckpointError: the weights of a language model cannot be read.
        UntrustedCodeError: a mixer is not trusted.

    Example:
        >>> import tempfile
        >>> from linrec.models import ModelConfig
        >>> from linrec.lab.report import read_runs
        >>> from linrec.lab.tasks import MemoryHorizon
        >>> from linrec.lab.train import LoopConfig, TrainConfig, fit
        >>> task = MemoryHorizon(length=8, n_resets=1, n_samples=20, n_validation=4, n_test=4)
        >>> model = ModelConfig(vocab_size=6, d_model=8, n_layers=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for seed in (0, 1):
        ...         loop = LoopConfig(batch_size=4, seed=seed, device="cpu")
        ...         _ = fit(TrainConfig("tiny", task, model, loop=loop), f"{folder}/runs/tiny-{seed}")
        ...     _ = collect_runs([f"{folder}/runs"], f"{folder}/table")
        ...     [(run.path.name, run.result["steps"]) for run in read_runs([f"{folder}/table"])]
        [('tiny-0', 3), ('tiny-1', 3)]
    """
    given = [Path(os.path.abspath(path)) for path in paths]
    if not given:
        raise RunFolderError("`paths` must name at least one folder; got none.")
    found = [(path, run) for path in given for run in read_stored([path])]
    top = Path(os.path.commonpath(given))
    if any(top in (run.folder, run.path) for _, run in found):
        # a single run is named too
        top = next(run.folder for _, run in found if top in (run.folder, run.path)).parent
    table = Path(os.path.abspath(out))
    if any((table / name).exists() for name in (ROWS, CURVES)):
        found = [(table, run) for run in read_stored([table])] + found
    # name in the table, name below the path, run
    once: list[tuple[str, str, Stored]] = []
    for path, run in found:
        name = run.folder.relative_to(table if path == table else top).as_posix()
        alone = path in (run.folder, run.path)
        below = run.folder.name if alone else run.folder.relative_to(path).as_posix()
        for place, (other_name, other_below, other) in enumerate(once):
            if _settings(run) == _settings(other) and (
                below == other_below or _origin(run) == _origin(other)
            ):
                if _reached(run) > _reached(other):
                    once[place] = (other_name, other_below, run)
                break
        else:
            once.append((name, below, run))
    names = [name for name, *_ in once]
    if twice := {name for name in names if names.count(name) > 1}:
        raise RunFolderError(
            f"{table} would have two runs of other configurations called {min(twice)!r}; pass another --out."
        )
    return write_table([(name, _kept(run, trust_code)) for name, _, run in once], Path(out))


def _settings(run: Stored) -> list[Any]:
    """Return the configuration of a run, and the model that it began from."""
    job, records = run.job or {}, run.records
    command = records.about.get("command") if records is not None else None
    start = re.search(r"--init-from[ =](\S+)", command or "")
    config = job.get("config") if records is None else records.config
    return [config, job.get("trial"), start and start.group(1), run.extra.get("distillation")]


def _origin(run: Stored) -> list[Any]:
    """Return the provenance of the first part of a run."""
    about = {} if run.records is None else run.records.about
    return [about.get(name) for name in ("commit", "versions", "device")]


def _reached(run: Stored) -> tuple[bool, int]:
    """Return whether a run has finished, and its last logged step."""
    if run.records is None:
        return False, -1
    return run.records.result is not None, max((record["step"] for record in run.records.metrics), default=0)


def _kept(run: Stored, trust_code: bool) -> Stored:
    """Return the run with the sample text of its weights."""
    if run.lost:
        raise RunFolderError(run.problem)
    if run.records is None or SAMPLE in run.extra or not has_weights(run.path):
        return run
    parsed = run_of(run.path, run.records, trust_code=trust_code)
    if not is_language_model(parsed):
        return run
    return dataclasses.replace(run, extra={**run.extra, SAMPLE: sample_text(parsed)})
