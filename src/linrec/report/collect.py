"""From run folders to a table."""

import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path

from linrec.report.sample import SAMPLE, has_weights, is_language_model, sample_text
from linrec.report.stored import read_stored
from linrec.report.tables import Stored, write_table
from linrec.train import RunFolderError
from linrec.train.run import run_of

__all__ = ["collect_runs"]


def collect_runs(
    paths: Iterable[str | os.PathLike[str]], out: str | os.PathLike[str], *, trust_code: bool = False
) -> tuple[Path, Path]:
    """Write a table of runs: `rows.jsonl` and `curves.jsonl`, with a line per run in each.

    Reports read a table as they read the run folders, which stay as they are. The table has no weights; of a
    language model with weights it keeps a sample text. Curves are rounded to 7 significant digits.

    Args:
        paths: run folders, folders of these, such as those of `linrec bench`, or tables. A run is named by
            its path below the folder that all paths have in common.
        out: folder for the table; it must have no table yet.
        trust_code: whether to import mixers that language models with weights name by import paths.

    Returns:
        The paths of both files.

    Raises:
        RunFolderError: a path has no runs, a run cannot be read, or the table cannot be written.
        CheckpointError: the weights of a language model cannot be read.
        UntrustedCodeError: a mixer is not trusted.

    Example:
        >>> import tempfile
        >>> from linrec.models import ModelConfig
        >>> from linrec.report import read_runs
        >>> from linrec.tasks import MemoryHorizon
        >>> from linrec.train import LoopConfig, TrainConfig, fit
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
    runs = read_stored(given)
    top = Path(os.path.commonpath(given))
    if any(top in (run.folder, run.path) for run in runs):
        # a single run is named too
        top = next(run.folder for run in runs if top in (run.folder, run.path)).parent
    return write_table(
        [(run.folder.relative_to(top).as_posix(), _kept(run, trust_code)) for run in runs], Path(out)
    )


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
