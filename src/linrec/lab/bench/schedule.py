"""Scheduling of jobs: one after another, or several in parallel with Ray."""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from linrec.extras import import_extra
from linrec.field_types import read_content
from linrec.files import append_to
from linrec.lab.bench.jobs import FAILED
from linrec.lab.report.records import OUTCOME, Outcome
from linrec.lab.train.run import write_json

__all__ = ["outcome_of", "run_jobs"]

LOG = "log.txt"


def run_jobs(
    folders: Sequence[Path],
    *,
    workers: int = 1,
    deadline: float | None = None,
    ended: Callable[[Path], None] | None = None,
) -> None:
    """Run the jobs of these folders, each in its own process; failures are written to the folder, not raised.

    Args:
        folders: folders of jobs, in the order in which the jobs start.
        workers: number of jobs to run at the same time. More than 1 needs Ray, which assigns a GPU, or a
            share of a GPU, to every job.
        deadline: `time.monotonic()` after which no job is started; None starts all jobs.
        ended: called with the folder of each job that has ended.

    Raises:
        MissingExtraError: Ray, which runs several workers, is not installed.
    """
    if workers == 1:
        for folder in folders:
            if deadline is not None and time.monotonic() >= deadline:
                return
            execute(folder)
            if ended is not None:
                ended(folder)
        return
    ray = _ray()
    gpus = torch.cuda.device_count()
    # "local" starts a new cluster; Ray would otherwise connect to a cluster that runs on this machine
    ray.init("local", num_cpus=workers, num_gpus=gpus, include_dashboard=False, logging_level="error")
    waiting: dict[Any, Path] = {}
    try:
        remote = ray.remote(num_cpus=1, num_gpus=_gpu_share(gpus, workers), max_retries=0)(_execute_until)
        # wall-clock time, because processes do not share a monotonic clock
        until = None if deadline is None else time.time() + deadline - time.monotonic()
        waiting.update({remote.remote(str(folder), until): folder for folder in folders})
        while waiting:
            finished, _ = ray.wait([*waiting])
            for reference in finished:
                folder = waiting.pop(reference)
                ray.get(reference)
                if ended is not None and outcome_of(folder) is not None:
                    ended(folder)
    except KeyboardInterrupt:
        # cancel before the shutdown, which kills, so that running jobs can write their checkpoints
        for reference in waiting:
            ray.cancel(reference)
        ray.wait([*waiting], num_returns=len(waiting))
        raise
    finally:
        ray.shutdown()


def execute(folder: Path) -> None:
    """Run a job in its own process; write its outcome if the process ended without doing so."""
    (folder / OUTCOME).unlink(missing_ok=True)
    command = [sys.executable, "-m", "linrec.lab.bench.worker", str(folder), str(os.getpid())]
    with append_to(folder / LOG) as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            status = _wait(process)
        except KeyboardInterrupt:
            # SIGTERM makes the job write its checkpoint; harmless if the terminal has interrupted it already
            process.terminate()
            process.wait()
            raise
    if (folder / OUTCOME).exists():
        return
    ended, message = FAILED, f"its process ended with exit status {status}; {folder / LOG} has its output"
    if status < 0:
        name = signal.Signals(-status).name
        often = ", possibly by the system because memory ran out" if name == "SIGKILL" else ""
        ended, message = "killed", f"killed by {name}{often}"
    write_json(folder / OUTCOME, {"status": ended, "message": message, "peak_bytes": None})


def _wait(process: subprocess.Popen[bytes]) -> int:
    while True:
        try:
            # a timeout, because Ray's cancellation, unlike a signal, does not interrupt a system call
            return process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            continue


def outcome_of(folder: Path) -> dict[str, Any] | None:
    """Return the outcome of a folder's job, or None if the job has not ended."""
    return read_content(folder / OUTCOME, Outcome)


def _gpu_share(gpus: int, workers: int) -> float:
    """Return the share of a GPU for each job: as few jobs per GPU as possible, and at most a GPU per job."""
    return 1 / math.ceil(workers / gpus) if gpus else 0.0


def _execute_until(folder: str, until: float | None) -> None:
    if until is None or time.time() < until:
        execute(Path(folder))


def _ray() -> Any:
    # disable Ray's telemetry
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    return import_extra("ray", "a suite with several --workers")
