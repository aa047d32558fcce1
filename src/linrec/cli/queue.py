"""`linrec bench queue JOBS`: work off a queue of training jobs in short allocations."""

import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from linrec.cli.main import main
from linrec.cli.options import QueueOptions
from linrec.cli.output import say
from linrec.errors import ConfigError, InterruptedRunError, TrainError
from linrec.files import FolderInUseError, locked
from linrec.lab.bench.queue import Queue, read_queue
from linrec.lab.bench.worker import stop_without


def run(options: QueueOptions, words: Sequence[str]) -> int:
    """Run `linrec bench queue`."""
    if options.per_gpu < 1 or not min(options.minutes, options.grace, options.carry) >= 0:
        raise ConfigError("`--per-gpu` must be at least 1, and --minutes, --grace and --carry not negative.")
    jobs, folder = read_queue(options.jobs), options.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            queue = Queue(jobs, folder, per_gpu=options.per_gpu, carry=options.carry, tell=_tell)
            stopped = queue.run(options.minutes, options.grace)
            if options.slim:
                queue.slim()
    except FolderInUseError as error:
        raise ConfigError(
            f"{folder}: {error.process} runs a queue here; wait, or pass another --folder."
        ) from None
    except OSError as error:
        raise TrainError(f"{folder} cannot be written: {error}.") from error
    of = {
        status: [job for job in jobs if job.status == status]
        for status in ("stopped", "waiting", "failed", "done")
    }
    for job in (*of["stopped"], *of["waiting"], *of["failed"]):
        say(job)
    say(f"{', '.join(f'{len(jobs)} {status}' for status, jobs in of.items())}; all in {folder}")
    if stopped:
        raise InterruptedRunError(f"stopped; the same command resumes from {folder}")
    return int(bool(of["failed"]))


def _tell(line: str) -> None:
    say(line)
    sys.stdout.flush()


def _job(starter: str, folder: str, *command: str) -> int:
    """Run the command of a job, which stops when its queue is killed."""
    threading.Thread(target=stop_without, args=(int(starter),), daemon=True).start()
    if Path(folder).exists():
        # the same job of a queue that was killed may still be writing its checkpoint
        with locked(Path(folder), wait=True):
            pass
    return main(command)


if __name__ == "__main__":
    sys.exit(_job(*sys.argv[1:]))
