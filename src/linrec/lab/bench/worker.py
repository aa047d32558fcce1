"""`python -m linrec.lab.bench.worker FOLDER [STARTER]`: run the job of a folder, and write its outcome."""

import dataclasses
import math
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from linrec.errors import memory_error
from linrec.files import locked
from linrec.lab.bench.jobs import FAILED, FILE, NO_DATA, OUTCOME, RUN, first_line, without_data
from linrec.lab.bench.speed import speed_by_length, state_elements
from linrec.lab.report.stored import read_record
from linrec.lab.tasks import Task, judged_by
from linrec.lab.train import DivergedError, InterruptedRunError, Progress, fit, load_run
from linrec.lab.train.config import config_from_dict
from linrec.lab.train.run import write_json
from linrec.text import DataError

__all__ = ["run_job", "stop_without"]


def run_job(folder: Path) -> str:
    """Train the model of `job.json`, resuming from a checkpoint if there is one, and write `outcome.json`.

    Args:
        folder: folder of the job.

    Returns:
        The status: "done", "no data", "diverged", "out of memory", "stopped" or "failed"; `outcome.json`
        gives the reason.
    """
    job = read_record(folder / FILE)
    run = folder / RUN
    status, message = "done", ""
    try:
        # a run that was interrupted before it wrote its configuration starts anew
        resume = (run / "config.json").exists()
        # trusted, because the user named the code in the command that wrote job.json
        config = config_from_dict(job["config"], trust_code=True)
        if resume:
            config = load_run(run, trust_code=config.import_paths).config
        result = fit(config, run, resume=resume, progress=_tell, command=job["command"])
        for split, scores in (("validation", result.validation), ("test", result.test)):
            if not math.isfinite(scores.get("loss", 0.0)):
                raise DivergedError(f"the loss on the {split} split is not finite; the training loss was.")
    except DataError as error:
        status, message = NO_DATA, without_data(job["task"], error)
    except DivergedError as error:
        status, message = "diverged", f"{error} In a suite, --lrs sets the learning rate."
    except InterruptedRunError:
        # the error's own message names a command for runs outside of a suite
        status, message = "stopped", "stopped with a checkpoint; the same command resumes from it."
    except Exception as error:
        status = FAILED if memory_error(error) is None else "out of memory"
        message = first_line(error)
        if status == FAILED:
            traceback.print_exc()
    outcome: dict[str, Any] = {"status": status, "message": message, "peak_bytes": _peak_bytes()}
    write_json(folder / OUTCOME, outcome)
    if status == "done":
        # a failure here leaves the job "done", because the model is trained and scored
        try:
            task = config.task.prepared()
            outcome |= _levels(task)
            config = dataclasses.replace(config, task=task)
            outcome["state_elements"] = state_elements(config)
            speed = result.steps_per_second * config.loop.batch_size
            outcome["speed_by_length"] = speed_by_length(config, sequences_per_second=speed)
        except Exception:
            traceback.print_exc()
        write_json(folder / OUTCOME, outcome)
    return status


def _levels(task: Task) -> dict[str, float | None]:
    """Return the scores of the task's baselines, which need data but no model."""
    if judged_by(task) == "perplexity":
        # the perplexity of a uniform guess among n tokens is n
        return {"chance": 1 / task.chance, "trivial_score": None}
    return {"chance": task.chance, "trivial_score": task.trivial_score}


def _tell(progress: Progress) -> None:
    if progress.logged:
        print(f"step {progress.step}/{progress.total_steps}, loss {progress.loss:.4g}", flush=True)


def _peak_bytes() -> dict[str, Any]:
    """Return the peak memory in bytes: of the CUDA device, if it was used, and of the process."""
    device = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None
    return {"device": device, "process": _process_peak_bytes()}


def _process_peak_bytes() -> int | None:
    """Return the most bytes of memory that this process had, or None where the system does not say.

    `resource.getrusage` has the peak of the process that started this process, if that was higher.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    found = re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)
    return found and int(found[1]) * 1024


def stop_without(starter: int, every: float = 1.0) -> None:
    """Stop this process, with a checkpoint, once the process that started it has ended.

    Killing a command does not kill its jobs: the job would go on running beside the same job of the next
    command.
    """
    while os.getppid() == starter:
        time.sleep(every)
    os.kill(os.getpid(), signal.SIGTERM)


def _main(words: Sequence[str]) -> int:
    folder, *starter = words
    for process in starter:
        threading.Thread(target=stop_without, args=(int(process),), daemon=True).start()
    # wait, because an earlier worker that is about to stop may still be writing its checkpoint
    with locked(Path(folder), wait=True):
        return 0 if run_job(Path(folder)) == "done" else 1


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
