"""From run folders to a table, with a sample text of each language model that has weights."""

import dataclasses
import itertools
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from linrec.generation import stream
from linrec.lab.report.records import CURVES, ROWS, Stored, learns, read_stored, write_table
from linrec.lab.tasks import LanguageModeling
from linrec.lab.train import Run, RunFolderError
from linrec.lab.train.checkpoint import BEST, CURRENT, PREVIOUS
from linrec.lab.train.run import run_of, tokenizer_of, writing
from linrec.text import DataError, Tokenizer

SAMPLE = "sample"
TOKENS = 200
TEMPERATURE = 0.8
SEED = 0


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
    found_at = map(Path, map(os.path.abspath, paths))
    given = [path.parent if path.name == ROWS and path.is_file() else path for path in found_at]
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
    kept = [(name, _kept(run, trust_code)) for name, _, run in once]
    with writing(f"write the table to {out}", RunFolderError):
        return write_table(kept, Path(out))


def _settings(run: Stored) -> list[Any]:
    """Return the configuration of a run, the model that it began from, and its further numbers."""
    job, records = run.job or {}, run.records
    command = records.about.get("command") if records is not None else None
    start = re.search(r"--init-from[ =](\S+)", command or "")
    config = job.get("config") if records is None else records.config
    further = {name: of for name, of in run.extra.items() if name not in ("perplexity", SAMPLE)}
    return [config, job.get("trial"), start and start.group(1), further]


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
    if run.records is None or learns(run.records.config) or not _has_weights(run.path):
        return run
    sample = sample_text(run_of(run.path, run.records, trust_code=trust_code, extra=run.extra))
    return run if sample is None else dataclasses.replace(run, extra={**run.extra, SAMPLE: sample})


def sample_text(run: Run) -> Mapping[str, Any] | None:
    """Return a text that a language model writes, or that its table keeps; None without weights."""
    if SAMPLE in run.extra:
        kept: Mapping[str, Any] = run.extra[SAMPLE]
        return kept
    if not is_language_model(run) or not _has_weights(run.path):
        return None
    tokenizer, model = tokenizer_of(run), run.model()
    prompt, described = _prompt(tokenizer)
    generated = stream(
        model,
        torch.tensor([[prompt]]),
        temperature=TEMPERATURE,
        seed=SEED,
        vocab_size=tokenizer.vocab_size,
    )
    numbers = (int(token) for token in itertools.islice(generated, TOKENS))
    tokens = [*itertools.takewhile(lambda token: token != tokenizer.end_of_document, numbers)]
    return {
        "text": tokenizer.decode(tokens),
        **{"prompt": described, "temperature": TEMPERATURE, "seed": SEED},
    }


def is_language_model(run: Run) -> bool:
    """Return whether a run trained a language model."""
    return isinstance(run.config.task, LanguageModeling)


def _has_weights(folder: Path) -> bool:
    """Return whether a run folder has a checkpoint, usable or not."""
    return any((folder / name).exists() for name in (BEST, CURRENT, PREVIOUS))


def _prompt(tokenizer: Tokenizer) -> tuple[int, str]:
    """Return the token that the text continues, and its description."""
    if tokenizer.end_of_document is not None:
        return tokenizer.end_of_document, "the end of a document"
    try:
        return int(tokenizer.encode("\n")[0]), "a newline"
    except (DataError, IndexError):
        return 0, repr(tokenizer.decode([0]))
