"""A queue of training jobs that short allocations of GPUs work off together.

- `queue.json`: how each job ended, or that it was stopped;
- `NAME/`, `NAME.log`: run folder of a job, or folder of its suite, and its output.

A job is a process of `linrec train` or `linrec bench`, which stops with a checkpoint on SIGTERM.
"""

import configparser
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from linrec.errors import ConfigError, unknown
from linrec.files import make_subfolder, read_json
from linrec.lab.bench.schedule import Processes
from linrec.lab.train.checkpoint import BEST, CURRENT, PREVIOUS
from linrec.lab.train.progress import Interrupt
from linrec.lab.train.run import CONFIG, RESULT, read_records, write_json

__all__ = ["Queue", "QueuedJob", "read_queue"]

STATE = "queue.json"
FIELDS = ("command", "minutes", "priority", "per-gpu", "checkpoint", "seeds")
KEPT = ("command", "status", "message", "failures", "ran", "bytes")
"""Attributes of a job that `queue.json` keeps."""
MIB = 2**20
START = 0.5
"""Minutes that a process takes to start and to compile."""
LEAST = 1.0
"""Minutes in which a part of a run is worth its start."""
TAIL = 5
"""Lines of a failed job's output to keep."""


@dataclass
class QueuedJob:
    """A command line of `linrec train` or `linrec bench`, and its status.

    Args:
        name: path of its folder below the folder of the queue.
        command: the words after "linrec", without the folder.
        minutes: estimate for the whole job; the speed of a part that has run replaces it.
        priority: jobs of higher priority start first.
        per_gpu: number of such jobs that may share a GPU; 0 takes the queue's number.
        bytes: size of its checkpoint; 0 is unknown.
        status: "waiting", "running", "stopped", "done" or "failed".
        message: why it failed or starts again.
        failures: number of failures; the second is the last.
        ran: minutes that it ran.
        left: minutes that it still takes.
    """

    name: str
    command: str
    minutes: float
    priority: float = 0.0
    per_gpu: int = 0
    bytes: int = 0
    status: str = "waiting"
    message: str = ""
    failures: int = 0
    ran: float = 0.0
    left: float = 0.0

    def __str__(self) -> str:
        left = "" if self.status in ("done", "failed") else f", {self.left:.1f} minutes left"
        message = self.message and f": {self.message}"
        return f"{self.name}: {self.status}, ran {self.ran:.1f} minutes{left}{message}"


def read_queue(path: Path) -> list[QueuedJob]:
    """Return the jobs of a queue file in its order; raise ConfigError if it cannot be used."""
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",), empty_lines_in_values=False)
    try:
        parser.read_string(path.read_text(encoding="utf-8"), str(path))
        jobs = [job for name in parser.sections() for job in _jobs(name, parser[name])]
        names = {PurePosixPath(job.name) for job in jobs}
        for name in names:
            if len(names) < len(jobs) or names & {*name.parents}:
                raise ValueError(f"every job needs a folder that is not within another job's; see [{name}].")
    except (OSError, ValueError, configparser.Error) as error:
        raise ConfigError(f"{path} cannot be used: {' '.join(str(error).split())}") from error
    return jobs


def _jobs(name: str, section: configparser.SectionProxy) -> list[QueuedJob]:
    for key in section:
        if key not in FIELDS:
            raise unknown(f"field of [{name}] called", key, FIELDS)
    words = shlex.split(section.get("command", ""))
    words = words[1:] if words[:1] == ["linrec"] else words
    given = {word.partition("=")[0] for word in words} & {"--out", "--resume"}
    if words[:1] not in (["train"], ["bench"]) or len(words) < 2 or given:
        raise ValueError(
            f"`command` of [{name}] must be train RECIPE or bench SUITE, without --out and --resume."
        )
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"the name [{name}] must be a path below the folder of the queue.")
    minutes, priority = section.getfloat("minutes", 0.0), section.getfloat("priority", 0.0)
    per_gpu, checkpoint = section.getint("per-gpu", 0), section.getfloat("checkpoint", 0.0)
    if not minutes > 0 or per_gpu < 0 or not checkpoint >= 0:
        raise ValueError(f"[{name}] needs `minutes` above 0, and no negative `per-gpu` or `checkpoint`.")
    size, option = int(checkpoint * MIB), "--loop.seed" if words[0] == "train" else "--seeds"
    seeds = {f"{name}-{seed}": [*words, option, seed] for seed in section.get("seeds", "").split()}
    return [
        QueuedJob(each, shlex.join(command), minutes, priority, per_gpu, size)
        for each, command in (seeds or {name: words}).items()
    ]


class Queue:
    """The jobs of a queue file, and the folder of their runs.

    Args:
        jobs: the jobs; see `read_queue`.
        folder: folder of the queue.
        per_gpu: number of jobs that share a GPU, for jobs that do not say it.
        carry: MiB that the next allocation can read. A run whose checkpoint does not fit starts only if all
            of the run fits into the time.
        tell: called with a line when a job starts or ends.
    """

    def __init__(
        self,
        jobs: Sequence[QueuedJob],
        folder: Path,
        *,
        per_gpu: int,
        carry: float,
        tell: Callable[[str], None],
    ) -> None:
        self._jobs, self._folder, self._per_gpu, self._tell = jobs, folder, per_gpu, tell
        self._carry = carry * MIB
        self._processes = Processes()
        # when each job started, and the jobs for whose whole run the time is too short
        self._began: dict[str, float] = {}
        self._split: set[str] = set()
        try:
            self._stored = read_json(folder / STATE) if (folder / STATE).exists() else {}
            for job in jobs:
                self._restore(job, self._stored.get(job.name, {}))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{folder / STATE} cannot be used: {error}") from error

    def run(self, minutes: float, grace: float) -> bool:
        """Run as many jobs as fit into the time; return whether a signal ended it.

        Args:
            minutes: time of the allocation.
            grace: the seconds of this time that are for writing checkpoints. Then jobs are killed.
        """
        until = time.monotonic() + 60 * minutes - grace
        with Interrupt() as interrupt:
            while not interrupt.requested and (left := (until - time.monotonic()) / 60) > 0:
                self._start(left)
                if not self._processes.running:
                    break
                while not interrupt.requested and time.monotonic() < until:
                    if statuses := self._processes.ended():
                        self._record(statuses)
                        break
            for statuses in self._processes.stop(grace):
                self._record(statuses, asked=True)
        self._save()
        return interrupt.requested

    def slim(self) -> None:
        """Delete files that neither resuming nor tables need, and checkpoints beyond `carry`."""
        room = self._carry
        for job in sorted(self._jobs, key=lambda job: -job.priority):
            run = self._folder / job.name
            needed = _weights(run)
            if _size(needed) > room:
                job.message = (
                    f"its checkpoint of {_size(needed) / MIB:.0f} MiB is not carried, so it starts again"
                )
                needed = []
            room -= _size(needed)
            for path in {*run.rglob("*.safetensors"), *run.rglob("*.tfevents.*")} - {*needed}:
                path.unlink()
            self._measure(job)
        self._save()

    def _restore(self, job: QueuedJob, stored: Mapping[str, Any]) -> None:
        """Set what `queue.json` has of a job."""
        command = job.command
        for name in KEPT if stored else ():
            setattr(job, name, stored[name])
        if job.status == "running":
            # the queue was killed
            job.status = "stopped"
        self._measure(job)
        if job.status != "waiting" and job.command != command:
            raise ValueError(f"{job.name} was begun as {job.command!r}; give the new job another name.")
        job.command = command

    def _start(self, left: float) -> None:
        """Start the jobs that fit; among jobs of a priority, those that were stopped come first."""
        waiting = [job for job in self._jobs if job.status in ("waiting", "stopped")]
        for job in sorted(waiting, key=lambda job: (-job.priority, job.status != "stopped")):
            # after a failure alone on a GPU, because memory may have run out
            share = 1.0 if job.failures else 1 / (job.per_gpu or self._per_gpu)
            gpu = self._processes.room(share)
            if gpu is None or not self._fits(job, left):
                continue
            run = self._folder / job.name
            make_subfolder(self._folder, Path(job.name).parent)
            words = [*shlex.split(job.command), "--out", str(run)]
            if words[0] == "train" and _weights(run):
                words = ["train", "--resume", str(run), *({"--trust-code"} & {*words})]
            job.status, job.message = "running", ""
            self._save()
            self._processes.start(job.name, "linrec.cli.queue", [str(run), *words], _log(run), gpu, share)
            self._began[job.name] = time.monotonic()
            if job.left > left:
                self._split.add(job.name)
            self._tell(str(job))

    def _fits(self, job: QueuedJob, left: float) -> bool:
        """Return whether all of a job fits into the time, or a part of the job and its checkpoint."""
        carried = sum(
            of.bytes for of in self._jobs if of is job or of.status == "stopped" or of.name in self._split
        )
        return job.left <= left or (left >= LEAST and carried <= self._carry)

    def _record(self, statuses: Mapping[str, int], *, asked: bool = False) -> None:
        """Record the jobs that have ended, by exit status; `asked` says that they were asked to stop."""
        for job in (job for job in self._jobs if job.name in statuses):
            job.ran += (time.monotonic() - self._began[job.name]) / 60
            job.status = "stopped"
            self._split.discard(job.name)
            if statuses[job.name] == 0:
                job.status = "done"
            elif not asked:
                output = _log(self._folder / job.name).read_text(encoding="utf-8", errors="replace")
                last = output.splitlines()[-TAIL:]
                job.message = " | ".join([f"exit status {statuses[job.name]}", *last])
                job.failures += 1
                job.status = "failed" if job.failures > 1 else "stopped"
            self._measure(job)
            self._save()
            self._tell(str(job))

    def _measure(self, job: QueuedJob) -> None:
        """Look into a job's folder for the minutes that it still takes and the size of its checkpoint."""
        run = self._folder / job.name
        needed = _weights(run)
        job.bytes = _size(needed) or job.bytes
        if (run / RESULT).exists():
            job.status = "done"
        elif job.status == "stopped" and not needed:
            job.status = "waiting"
        job.left = job.minutes
        if job.command.startswith("bench "):
            # a suite does not say how much of it is done
            job.left = max(job.minutes - job.ran, job.minutes / 10)
        elif (run / CONFIG).exists():
            _, about, metrics, _ = read_records(run)
            trained = [(each["step"], each["seconds"]) for each in metrics if each["split"] == "train"]
            if trained:
                # the first window has the compilation, which `START` stands for
                (step, seconds), (last, end) = trained[0] if trained[1:] else (0, 0.0), trained[-1]
                todo = about["total_steps"] - (last if needed else 0)
                job.left = START + todo * (end - seconds) / (last - step) / 60

    def _save(self) -> None:
        for job in self._jobs:
            self._stored[job.name] = {name: getattr(job, name) for name in KEPT}
        write_json(self._folder / STATE, self._stored)


def _weights(folder: Path) -> list[Path]:
    """Return the files of weights that resuming the runs in a folder needs."""
    found = []
    for run in sorted({path.parent for path in folder.rglob("*.safetensors")}):
        newest = CURRENT if (run / CURRENT).exists() else PREVIOUS
        if not (run / RESULT).exists():
            found += [run / name for name in (newest, BEST) if (run / name).exists()]
    return found


def _size(files: Sequence[Path]) -> int:
    return sum(path.stat().st_size for path in files)


def _log(run: Path) -> Path:
    return run.with_name(f"{run.name}.log")
