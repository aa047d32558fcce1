"""`python -m linrec.bench.worker FOLDER [STARTER]`: run the job of a folder, and write how it went."""

import dataclasses
import math
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from linrec.bench.jobs import FAILED, FILE, NO_DATA, OUTCOME, RUN, first_line, without_data
from linrec.bench.speed import speed_by_length, state_elements
from linrec.errors import memory_error
from linrec.files import locked, read_json
from linrec.tasks import Task, judged_by
from linrec.text import DataError
from linrec.train import DivergedError, InterruptedRunError, Progress, fit, load_run
from linrec.train.config import config_from_dict
from linrec.train.run import write_json

__all__ = ["run_job"]


def run_job(folder: Path) -> str:
    """Train what `job.json` says, or go on with it, and write `outcome.json`.

    Args:
        folder: of the job.

    Returns:
        The status: "done"; or "no data", "diverged", "out of memory", "stopped" or "failed", and the file
        says why.
    """
    job = read_json(folder / FILE)
    run = folder / RUN
    status, message = "done", ""
    try:
        # a run that has not come to its first line is begun again
        resume = (run / "config.json").exists()
        # the command that wrote job.json was given the mixer
        config = config_from_dict(job["config"], trust_code=True)
        if resume:
            config = load_run(run, trust_code=config.model.mixer_pattern).config
        result = fit(config, run, resume=resume, progress=_tell, command=job["command"])
        for split, scores in (("validation", result.validation), ("test", result.test)):
            if not math.isfinite(scores.get("loss", 0.0)):
                raise DivergedError(f"the loss on the {split} split is not finite; that of training was.")
    except DataError as error:
        status, message = NO_DATA, without_data(job["task"], error)
    except DivergedError as error:
        status, message = "diverged", f"{error} In a suite, --lrs says the learning rate."
    except InterruptedRunError:
        # the run itself names another command, for runs without a suite
        status, message = "stopped", "stopped with a checkpoint; the same command goes on from there."
    except Exception as error:
        status = FAILED if memory_error(error) is None else "out of memory"
        message = first_line(error)
        if status == FAILED:
            traceback.print_exc()
    outcome: dict[str, Any] = {"status": status, "message": message, "peak_bytes": _peak_bytes()}
    write_json(folder / OUTCOME, outcome)
    if status == "done":
        # whatever becomes of that, the model is trained
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
    """What needs no model, now that the data are there."""
    if judged_by(task) == "perplexity":
        # of a uniform guess among n tokens it is n
        return {"chance": 1 / task.chance, "trivial_score": None}
    return {"chance": task.chance, "trivial_score": task.trivial_score}


def _tell(progress: Progress) -> None:
    if progress.logged:
        print(f"step {progress.step}/{progress.total_steps}, loss {progress.loss:.4g}", flush=True)


def _peak_bytes() -> dict[str, Any]:
    """Most memory in use: on the device, if it is another than the CPU, and by the process."""
    # in KiB, but on macOS
    unit = 1 if sys.platform == "darwin" else 1024
    process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    device = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None
    return {"device": device, "process": process}


def _stop_without(starter: int, every: float = 1.0) -> None:
    """Stop this process, with a checkpoint, once the process that started it is no more.

    A command that is killed takes nothing with it: its job would go on, and beside it the same job of the
    next command.
    """
    while os.getppid() == starter:
        time.sleep(every)
    os.kill(os.getpid(), signal.SIGTERM)


def _main(words: Sequence[str]) -> int:
    folder, *starter = words
    for process in starter:
        threading.Thread(target=_stop_without, args=(int(process),), daemon=True).start()
    # one that is about to stop may still be writing its checkpoint
    with locked(Path(folder), wait=True):
        return 0 if run_job(Path(folder)) == "done" else 1


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
