"""Where jobs run: one after another, or several at a time by Ray."""

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

from linrec.bench.jobs import FAILED, OUTCOME
from linrec.extras import import_extra
from linrec.files import append_to, read_json
from linrec.train.run import write_json

__all__ = ["outcome_of", "run_jobs"]

LOG = "log.txt"


def run_jobs(
    folders: Sequence[Path],
    *,
    workers: int = 1,
    deadline: float | None = None,
    ended: Callable[[Path], None] | None = None,
) -> None:
    """Run the jobs of these folders, each in a process of its own; what fails is written down, not raised.

    Args:
        folders: of jobs, in the order in which they start.
        workers: how many run at a time. More than one need Ray, which gives each a GPU, or its share of one.
        deadline: `time.monotonic()` after which no more is started; None starts all.
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
    # of its own: a cluster that happens to run here was not asked for
    ray.init("local", num_cpus=workers, num_gpus=gpus, include_dashboard=False, logging_level="error")
    waiting: dict[Any, Path] = {}
    try:
        remote = ray.remote(num_cpus=1, num_gpus=_gpu_share(gpus, workers), max_retries=0)(_execute_until)
        # the clocks of processes on one machine agree, but not their monotonic ones
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
        # shutting down kills; this lets those that run write their checkpoints
        for reference in waiting:
            ray.cancel(reference)
        ray.wait([*waiting], num_returns=len(waiting))
        raise
    finally:
        ray.shutdown()


def execute(folder: Path) -> None:
    """Run one job in a process of its own, and write down how it ended where it could not do so itself."""
    (folder / OUTCOME).unlink(missing_ok=True)
    command = [sys.executable, "-m", "linrec.bench.worker", str(folder), str(os.getpid())]
    with append_to(folder / LOG) as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            status = _wait(process)
        except KeyboardInterrupt:
            # it writes its checkpoint; where a terminal has interrupted it too, this changes nothing
            process.terminate()
            process.wait()
            raise
    if (folder / OUTCOME).exists():
        return
    ended, message = FAILED, f"its process left with exit status {status}; {folder / LOG} has what it said"
    if status < 0:
        name = signal.Signals(-status).name
        often = ", as the system does where memory runs out" if name == "SIGKILL" else ""
        ended, message = "killed", f"killed by {name}{often}"
    write_json(folder / OUTCOME, {"status": ended, "message": message, "peak_bytes": None})


def _wait(process: subprocess.Popen[bytes]) -> int:
    while True:
        try:
            # Ray's way to cancel, unlike a signal, is seen between system calls alone
            return process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            continue


def outcome_of(folder: Path) -> dict[str, Any] | None:
    """Return how the job of a folder ended, None if it did not end yet."""
    try:
        return read_json(folder / OUTCOME)
    except FileNotFoundError:
        return None


def _gpu_share(gpus: int, workers: int) -> float:
    """What a job takes of a GPU: jobs share one, as few as possible, but none is spread over several."""
    return 1 / math.ceil(workers / gpus) if gpus else 0.0


def _execute_until(folder: str, until: float | None) -> None:
    if until is None or time.time() < until:
        execute(Path(folder))


def _ray() -> Any:
    # it would tell its makers of every use
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    return import_extra("ray", "a suite with several --workers")
