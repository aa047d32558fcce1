"""Processes that share GPUs, and the jobs of a suite, one process each."""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from linrec.field_types import read_content
from linrec.files import append_to
from linrec.lab.bench.jobs import FAILED
from linrec.lab.report.records import OUTCOME, Outcome
from linrec.lab.train.run import write_json

__all__ = ["Processes", "outcome_of", "run_jobs"]

LOG = "log.txt"
POLL = 0.2
"""Seconds between looks at the processes."""


class _Child(NamedTuple):
    process: "subprocess.Popen[bytes]"
    gpu: str
    share: float


class Processes:
    """Python processes by name, which share the visible GPUs; without a GPU, they share the processor so."""

    def __init__(self) -> None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [*map(str, range(torch.cuda.device_count()))]
        self.gpus = names[: torch.cuda.device_count()] or [""]
        self.running: dict[str, _Child] = {}

    def room(self, share: float) -> str | None:
        """Return the GPU with the least load, or None if it has less room than a share of a GPU."""
        children = self.running.values()
        loads = {gpu: sum(child.share for child in children if child.gpu == gpu) for gpu in self.gpus}
        gpu = min(loads, key=lambda name: loads[name])
        return gpu if loads[gpu] + share <= 1 + 1e-6 else None

    def start(self, name: str, module: str, words: Sequence[str], log: Path, gpu: str, share: float) -> None:
        """Start `python -m module words...`, with its output in a file; an empty `gpu` leaves all visible."""
        with append_to(log) as output:
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(os.getpid()), *words],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})},
            )
        self.running[name] = _Child(process, gpu, share)

    def ended(self) -> dict[str, int]:
        """Return the exit statuses of processes that have ended; wait a moment if all still run."""
        statuses = {name: child.process.poll() for name, child in self.running.items()}
        ended = {name: status for name, status in statuses.items() if status is not None}
        for name in ended:
            del self.running[name]
        if self.running and not ended:
            time.sleep(POLL)
        return ended

    def stop(self, seconds: float = math.inf) -> Iterator[dict[str, int]]:
        """Ask all processes to write their checkpoints and end, kill them after some seconds; as `ended`."""
        until = time.monotonic() + seconds
        for child in self.running.values():
            child.process.terminate()
        while self.running:
            for child in self.running.values() if time.monotonic() > until else ():
                child.process.kill()
            yield self.ended()


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
        workers: number of jobs to run at the same time. More than 1 share the GPUs: as few jobs per GPU as
            possible.
        deadline: `time.monotonic()` after which no job is started; None starts all jobs.
        ended: called with the folder of each job that has ended.
    """
    processes, waiting = Processes(), [*folders]
    share = 1 / math.ceil(workers / len(processes.gpus))
    try:
        while waiting or processes.running:
            if deadline is not None and time.monotonic() >= deadline:
                waiting = []
            while waiting and len(processes.running) < workers and (gpu := processes.room(share)) is not None:
                folder = waiting.pop(0)
                (folder / OUTCOME).unlink(missing_ok=True)
                # a single job keeps all GPUs
                where = gpu if workers > 1 else ""
                processes.start(
                    str(folder), "linrec.lab.bench.worker", [str(folder)], folder / LOG, where, share
                )
            statuses = processes.ended()
            for folder in map(Path, statuses):
                _close(folder, statuses[str(folder)])
                if ended is not None:
                    ended(folder)
    finally:
        # after Ctrl-C; harmless if the terminal has interrupted the jobs already
        for _ in processes.stop():
            pass


def _close(folder: Path, status: int) -> None:
    """Write the outcome of a job whose process ended without doing so."""
    if (folder / OUTCOME).exists():
        return
    ended, message = FAILED, f"its process ended with exit status {status}; {folder / LOG} has its output"
    if status < 0:
        name = signal.Signals(-status).name
        often = ", possibly by the system because memory ran out" if name == "SIGKILL" else ""
        ended, message = "killed", f"killed by {name}{often}"
    write_json(folder / OUTCOME, {"status": ended, "message": message, "peak_bytes": None})


def outcome_of(folder: Path) -> dict[str, Any] | None:
    """Return the outcome of a folder's job, or None if the job has not ended."""
    return read_content(folder / OUTCOME, Outcome)
