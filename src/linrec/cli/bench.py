"""`linrec bench SUITE`: compare mixers on the tasks of a suite."""

import contextlib
import dataclasses
import math
import re
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from linrec.cli.options import BenchOptions
from linrec.cli.output import say
from linrec.cli.parsing import one_line_errors
from linrec.errors import ConfigError, InterruptedRunError, TrainError, printable, unknown
from linrec.files import FolderInUseError, locked
from linrec.lab.bench import (
    STREAMS,
    Entry,
    Job,
    StreamEntry,
    get_suite,
    make_jobs,
    make_rows,
    make_stream_jobs,
    run_jobs,
    write_rows,
)
from linrec.lab.bench.jobs import Sizes, equally_many, write_job
from linrec.lab.bench.page import write_page
from linrec.lab.bench.rows import Standing, level, standings, validation_loss
from linrec.lab.bench.schedule import outcome_of
from linrec.lab.bench.variants import split_list
from linrec.lab.report.records import JOB
from linrec.lab.streams.learn import LearnConfig
from linrec.lab.style import FORMATS, format_mean_and_spread, mean_and_spread
from linrec.lab.train.fabric import program
from linrec.rules import at_least

FACTORS = (1 / 3, 1.0, 3.0)
"""Multiples of the recipe's learning rate that a sweep tries; the same for every mixer."""


def run(options: BenchOptions, words: Sequence[str]) -> int:
    """Run `linrec bench`."""
    options = with_names_apart(options)
    out = options.out or Path("bench") / options.suite
    with one_line_errors():
        is_streams = options.suite == "streams"
        entries: dict[str, Entry | StreamEntry] = {
            entry.name: entry for entry in (STREAMS if is_streams else get_suite(options.suite))
        }
        given = [_data(word) for word in options.data]
        for task in (*options.tasks, *(task for task, _ in given)):
            if task not in entries:
                raise unknown(f"task of suite {options.suite!r} called", task, entries)
        _check(options)
        paths = dict(given)
        chosen = [entry for name, entry in entries.items() if name in options.tasks or not options.tasks]
        trained = [
            entry.reading(paths[entry.name]) if entry.name in paths else entry
            for entry in chosen
            if isinstance(entry, Entry)
        ]
    if is_streams:
        streams = [entry for entry in chosen if isinstance(entry, StreamEntry)]
        jobs = make_stream_jobs(streams, options.learners, options.seeds, options.steps)
    else:
        jobs = make_jobs(trained, options.mixers, options.seeds, parameters=options.parameters)
    # messages of failed jobs may contain square brackets, which rich would read as markup
    console = Console(width=None if sys.stdout.isatty() else 80, markup=False)
    _show_models(console, jobs, options.parameters)
    deadline = None if options.budget is None else time.monotonic() + 60 * options.budget
    suite = _Suite(options, out, deadline, console)
    # a job scheduler's SIGTERM is handled like Ctrl-C
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    lock = contextlib.ExitStack()
    try:
        out.mkdir(parents=True, exist_ok=True)
        # two processes would train the same jobs and overwrite each other's rows
        lock.enter_context(locked(out))
        first = [job for job in jobs if job.seed == options.seeds[0]]
        rest = [job for job in jobs if job.seed != options.seeds[0]]
        factors = FACTORS if options.sweep else ()
        if options.lrs or factors:
            trials = [
                [job.at(lr) for lr in options.lrs or [job.lr * factor for factor in factors]] for job in first
            ]
            suite.run([trial for of_job in trials for trial in of_job])
            best = {(of_job[0].task, of_job[0].mixer): suite.best(of_job) for of_job in trials}
            rest = [job.at(best[job.task, job.mixer]) for job in rest]
        else:
            suite.run(first)
        suite.run(rest)
    except FolderInUseError as error:
        raise ConfigError(
            f"{out}: {error.process} runs linrec bench here; wait until it ends, or give another --out."
        ) from None
    except KeyboardInterrupt:
        suite.write()
        raise InterruptedRunError(f"stopped; the same command resumes from {out}") from None
    except OSError as error:
        raise TrainError(f"{out} cannot be written: {error}.") from error
    finally:
        lock.close()
        signal.signal(signal.SIGTERM, before)
    rows, files = suite.write()
    _show_scores(console, rows)
    say(f"all in {out}: {', '.join(file.name for file in files)}")
    return int(any(row["status"] != "done" for row in rows))


def with_names_apart(options: BenchOptions) -> BenchOptions:
    """Return the options with the names that share a word, as in --mixers gla,lru, one by one."""
    names: dict[str, Any] = {
        option: tuple(name for word in getattr(options, option) for name in split_list(word))
        for option in ("mixers", "learners", "tasks")
    }
    return dataclasses.replace(options, **names)


class _Suite:
    """The jobs requested so far, and their folders."""

    def __init__(self, options: BenchOptions, out: Path, deadline: float | None, console: Console) -> None:
        self._options, self._out, self._deadline, self._console = options, out, deadline, console
        self._folders: list[Path] = []
        self._next = 0.0

    def run(self, jobs: Sequence[Job]) -> None:
        """Run the jobs that have not yet ended with status "done"."""
        folders = [write_job(job, self._out, {"command": self._command(job)}) for job in jobs]
        self._folders += folders
        ended = [folder for folder in folders if (outcome_of(folder) or {}).get("status") == "done"]
        if ended:
            self._console.print(f"{len(ended)} of {len(folders)} jobs are already done")
        unfit = {folder for job, folder in zip(jobs, folders, strict=True) if job.ended}
        for folder in folders:
            if folder in unfit:
                self._tell(folder)
        self._keep()
        left = [folder for folder in folders if folder not in {*ended, *unfit}]
        run_jobs(left, workers=self._options.workers, deadline=self._deadline, ended=self._ended)

    def write(self) -> tuple[list[dict[str, Any]], list[Path]]:
        """Write rows and page of all jobs in the folder, earlier commands' too; return rows and files."""
        others = sorted(file.parent for file in self._out.glob(f"*/*/*/{JOB}"))
        folders = [*self._folders, *(folder for folder in others if folder not in self._folders)]
        rows, title = make_rows(folders), f"linrec bench {self._options.suite}"
        return rows, [*write_rows(folders, self._out), write_page(rows, self._out, title=title)]

    def best(self, trials: Sequence[Job]) -> float:
        """Return the learning rate of the lowest validation loss, or the middle rate if no trial ended."""
        losses = {
            trial.lr: validation_loss(row)
            for trial, row in zip(trials, make_rows([self._out / t.folder for t in trials]), strict=True)
            if row["status"] == "done"
        }
        if not losses:
            return trials[len(trials) // 2].lr
        return min(losses, key=lambda lr: losses[lr])

    def _ended(self, folder: Path) -> None:
        self._tell(folder)
        self._keep()

    def _keep(self) -> None:
        """Write rows and page now and then, in at most 5% of the time, in case the command is killed."""
        start = time.monotonic()
        if start >= self._next:
            self.write()
            self._next = start + 20 * (time.monotonic() - start)

    def _tell(self, folder: Path) -> None:
        row = make_rows([folder])[0]
        score = f"{row['metric']} {row['score']:.4g}" if row["status"] == "done" else row["message"]
        told = f"{folder.relative_to(self._out)}: {row['status']}, {score}"
        self._console.print(printable(told), highlight=False)

    def _command(self, job: Job) -> str:
        rate = ["--lrs", f"{job.lr:g}"] if job.trial else []
        compared = "--mixers" if job.steps is None else "--learners"
        words = [self._options.suite, compared, job.mixer, "--tasks", job.task, "--seeds", str(job.seed)]
        if isinstance(job.config, LearnConfig):
            return shlex.join([*program(), "bench", *words, "--steps", str(job.steps), *rate])
        path = getattr(job.config.task, "path", None)
        data = ["--data", f"{job.task}={path}"] if path is not None else []
        size = ["--parameters", str(job.sizes.parameters)] if job.sizes else []
        return shlex.join([*program(), "bench", *words, *data, *size, *rate])


def _data(word: str) -> tuple[str, Path]:
    task, _, path = word.partition("=")
    if not task or not path:
        raise ValueError(f"`--data` must be TASK=PATH, such as shakespeare-char=input.txt; got {word!r}.")
    return task, Path(path)


def _check(options: BenchOptions) -> None:
    streams = options.suite == "streams"
    if streams and (options.mixers or options.parameters or options.data):
        raise ValueError(
            "suite 'streams' compares learners, and takes no `--mixers`, `--parameters` or `--data`. Pass "
            "`--learners`, or train on a stream with `linrec learn`."
        )
    if not streams and (options.learners or options.steps):
        raise ValueError("`--learners` and `--steps` are for suite 'streams'. Leave them out.")
    if not streams and not options.mixers:
        raise ValueError("`--mixers` needs at least one name, such as --mixers gate_loop gla attention.")
    if not options.seeds or min(options.seeds) < 0:
        raise ValueError(f"`--seeds` must be integers of at least 0; got {list(options.seeds)}.")
    if not all(0 < lr < math.inf for lr in options.lrs):
        raise ValueError(f"`--lrs` must be positive and finite; got {list(options.lrs)}.")
    for name, given in (("--seeds", options.seeds), ("--lrs", options.lrs)):
        if len(set(given)) < len(given):
            raise ValueError(f"`{name}` must be different; got {list(given)}.")
    counts: dict[str, Any] = {
        "--workers": options.workers,
        "--parameters": options.parameters,
        "--steps": options.steps,
    }
    at_least(1, or_none=True, **counts)
    if options.budget is not None and not options.budget > 0:
        raise ValueError(f"`--budget` must be above 0 minutes; got {options.budget:g}.")


def _show_models(console: Console, jobs: Sequence[Job], parameters: int | None) -> None:
    """Print the size of every model, and every model whose size differs from the target."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("task", no_wrap=True)
    table.add_column("mixer", overflow="fold")
    for heading in ("width", "parameters", "state"):
        table.add_column(heading, justify="right", no_wrap=True)
    first = [job for job in jobs if job.seed == jobs[0].seed]
    # the width that the other columns leave
    states = [len(_state(job.sizes)) for job in first if job.sizes]
    room = console.width - max(len(job.task) for job in first) - max([5, *states]) - 23
    for job in first:
        shown = [job.ended[0]] if job.ended else []
        if job.sizes:
            shown = [f"{job.d_model:,}", f"{job.sizes.parameters:,}", _state(job.sizes)]
        table.add_row(job.task, _in_lines(job.mixer, room), *shown)
    console.print(table)
    of_task: dict[str, int] = {}
    for job in first:
        if job.sizes and job.steps is None:
            wanted = of_task.setdefault(job.task, parameters or job.sizes.parameters)
            if not equally_many(wanted, job.sizes.parameters):
                sentence = f"{job.sizes.parameters:,} parameters; no width comes nearer to {wanted:,}"
                console.print(f"{job.task}/{job.mixer}: {sentence}", highlight=False)


def _state(of: Sizes) -> str:
    """Format the size of a sequence's state: its constant part, and its growth per step."""
    constant = of.state - of.grows
    parts = [f"{constant:,}"] * (constant > 0 or not of.grows) + [f"{of.grows:,} a step"] * (of.grows > 0)
    return " + ".join(parts)


def _show_scores(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """Print scores on the test split: mean and standard deviation over seeds."""
    found = standings(rows)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("task", no_wrap=True)
    table.add_column("mixer", overflow="fold")
    table.add_column("test score", justify="right", no_wrap=True)
    table.add_column("of", no_wrap=True)
    probed = any("length" in standing.probes for standing in found)
    if probed:
        table.add_column("longest", justify="right", no_wrap=True)
    # the width that the other columns leave
    room = console.width - max(map(len, (row["task"] for row in rows))) - (46 if probed else 30)
    for task, metric in {row["task"]: row["metric"] for row in rows}.items():
        lines = [
            (_in_lines(standing.mixer, room), _score(standing), _longest(standing))
            for standing in found
            if standing.task == task
        ]
        for label, name in (("chance", "chance"), ("trivial predictor", "trivial_score")):
            if (value := level(rows, task, name)) is not None:
                lines.append((label, f"{value:.3g}", ""))
        # the task and its metric are printed only in the first line of the task
        of_task = [(task, metric), *(("", "") for _ in lines[1:])]
        for (task_name, of), (label, score, longest) in zip(of_task, lines, strict=True):
            table.add_row(*map(printable, (task_name, label, score, of, *([longest] if probed else []))))
    console.print(table)
    for row in rows:
        if row["status"] not in ("done", "not run"):
            where = f"{row['task']}/{row['mixer']} seed {row['seed']} {row['trial']}".strip()
            console.print(printable(f"{where}: {row['status']}: {row['message']}"), highlight=False)
    if missing := sum(row["status"] == "not run" for row in rows):
        console.print(f"jobs that were not run: {missing}; the same command resumes", highlight=False)


def _score(standing: Standing) -> str:
    scores = standing.scores
    if not scores:
        return str(standing.failed[0]["status"])
    return format_mean_and_spread(scores, FORMATS[standing.metric])


def _in_lines(label: str, width: int) -> str:
    """Break a label into lines between its parts; rich would break it anywhere."""
    lines = [""]
    for part in re.findall(r"[^(,+:]+[(,+:]? ?|.", label):
        if lines[-1] and len(lines[-1] + part.rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


def _longest(standing: Standing) -> str:
    if not (by_length := standing.probes.get("length")):
        return ""
    length, scores = max(by_length.items())
    return f"{mean_and_spread(scores).mean:{FORMATS[standing.metric]}} at {length:,}"
