"""`python -m linrec.lab.bench.worker STARTER FOLDER`: run the job of a folder, and write its outcome.

After training, the worker measures the state of the model, and the speed and memory of training by length.
"""

import dataclasses
import functools
import math
import os
import re
import signal
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from linrec.errors import memory_error
from linrec.field_types import read_content
from linrec.files import locked
from linrec.lab.bench.jobs import FAILED, NO_DATA, first_line, without_data
from linrec.lab.report.records import JOB, OUTCOME, RUN, JobRecord, learns
from linrec.lab.streams.learn import LearnConfig, Learning, learn
from linrec.lab.tasks import Batch, PairedTask, judged_by
from linrec.lab.train import DivergedError, InterruptedRunError, Progress, TrainConfig, fit, load_run
from linrec.lab.train.config import config_from_dict, make_model
from linrec.lab.train.data import on_device
from linrec.lab.train.fabric import make_fabric, matmul_precision
from linrec.lab.train.optim import make_optimizers
from linrec.lab.train.records import Result
from linrec.lab.train.run import CONFIG, write_json
from linrec.lab.train.step import Objective, train_step
from linrec.mixers import Mixer
from linrec.models import ModelConfig
from linrec.text import DataError
from linrec.trees import leaves

__all__ = ["run_job", "stop_without"]

LONGEST = 16_384
STEP_SECONDS = 0.1
"""Target duration of a step: the batch size is chosen for it, up to the batch size of training."""

SEQUENCE_SECONDS = 1.5
"""Longest duration of a sequence; lengths whose sequences would take longer are left out."""

SECONDS = 6.0
"""Time after which no further length is measured; compiling kernels for a length can take most of it."""


def run_job(folder: Path) -> str:
    """Train the model of `job.json`, resuming from a checkpoint if there is one; return the status."""
    job = read_content(folder / JOB, JobRecord)
    assert job is not None
    status, message, measure = "done", "", None
    try:
        measure = (_learned if learns(job["config"]) else _trained)(job, folder / RUN)
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
    # of the CUDA device, if it was used, and of the process
    device = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None
    peak = {"device": device, "process": _process_peak_bytes()}
    outcome: dict[str, Any] = {"status": status, "message": message, "peak_bytes": peak}
    write_json(folder / OUTCOME, outcome)
    if measure is not None:
        # a failure here leaves the job "done", because the model is trained and scored
        try:
            measure(outcome)
        except Exception:
            traceback.print_exc()
        write_json(folder / OUTCOME, outcome)
    return status


Measure: TypeAlias = Callable[[dict[str, Any]], None]
"""Adds the fields that are measured after training to the content of `outcome.json`."""


def _trained(job: dict[str, Any], run: Path) -> Measure:
    """Train a model; a run that was interrupted before it wrote its configuration starts anew."""
    # trusted, because the user named the code in the command that wrote job.json
    config = config_from_dict(job["config"], trust_code=True)
    if resume := (run / CONFIG).exists():
        config = load_run(run, trust_code=config.import_paths).config
    result = fit(config, run, resume=resume, progress=_tell, command=job["command"])
    for split, scores in (("validation", result.validation), ("test", result.test)):
        if not math.isfinite(scores.get("loss", 0.0)):
            raise DivergedError(f"the loss on the {split} split is not finite; the training loss was.")
    return functools.partial(_measured_training, config, result)


def _learned(job: dict[str, Any], run: Path) -> Measure:
    config, resume = LearnConfig(**job["config"]), (run / CONFIG).exists()
    found = learn(config, run, steps=job["steps"], resume=resume, command=job["command"], told=_tell_window)
    return functools.partial(_measured_learning, config, found["bounds"])


def _measured_training(config: TrainConfig, result: Result, outcome: dict[str, Any]) -> None:
    task = config.task.prepared()
    # scores of the task's baselines; the perplexity of a uniform guess among n tokens is n
    perplexity = judged_by(task) == "perplexity"
    outcome["chance"] = 1 / task.chance if perplexity else task.chance
    outcome["trivial_score"] = None if perplexity else task.trivial_score
    config = dataclasses.replace(config, task=task)
    outcome["state_elements"] = state_elements(config)
    speed = result.steps_per_second * config.loop.batch_size
    outcome["speed_by_length"] = speed_by_length(config, sequences_per_second=speed)


def _measured_learning(config: LearnConfig, bounds: Mapping[str, float], outcome: dict[str, Any]) -> None:
    """Measure a chunk: its speed and its memory, without model, optimiser and the learner's memory."""
    learning = Learning(config)
    outcome |= {"chance": None, "trivial_score": next(iter(bounds.values()), None)}
    # warm up: the optimiser's state
    learning.advance(config.chunk)
    start, learned = time.perf_counter(), 0
    while time.perf_counter() - start < STEP_SECONDS:
        learning.advance(config.chunk)
        learned += config.rows * config.chunk
    speed = learned / (time.perf_counter() - start)
    step_bytes = _step_bytes(lambda: learning.advance(config.chunk), learning.device)
    found = {"length": config.chunk, "batch_size": config.rows, "tokens_per_second": speed}
    outcome["speed_by_length"] = [{**found, "step_bytes": step_bytes}]


def _tell(progress: Progress) -> None:
    if progress.logged:
        print(f"step {progress.step}/{progress.total_steps}, loss {progress.loss:.4g}", flush=True)


def _tell_window(learning: Learning) -> None:
    print(f"step {learning.steps}, loss {learning.scores.curve[-1]:.4g}", flush=True)


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


def state_elements(config: TrainConfig) -> int:
    """Return the number of elements in the state after a sequence; of a classifier, in its mixers."""
    model = make_fabric(config.loop).setup_module(make_model(config.sequence_model)).eval()
    inputs = _random_batch(config, 1, _length(config)).inputs.to(next(model.parameters()).device)
    returns_state = isinstance(config.model, ModelConfig)
    states: list[Any] = []
    for module in () if returns_state else model.modules():
        if isinstance(module, Mixer):
            module.register_forward_hook(lambda _, __, result: states.append(result[1]))
    with torch.no_grad():
        result = model(inputs)
    return sum(tensor[0].numel() for tensor in leaves(result[1] if returns_state else states))


def speed_by_length(config: TrainConfig, *, sequences_per_second: float) -> list[dict[str, Any]]:
    """Measure training steps at the task's length, at a quarter of this length and at four times this length.

    A step is a training step on random inputs with a freshly initialised model: forward, backward, optimiser.
    Steps run without `torch.compile`, because compiling would take longer than all measurements. Batches have
    the same number of tokens at all lengths: a training batch's number, or fewer if steps are slow, as
    `sequences_per_second` of training tells. Lengths that would take too long are left out. "step_bytes" is
    the peak memory of a step without model and optimiser; numbers are None if the model refuses the length.
    """
    length = _length(config)
    tokens_per_second = sequences_per_second * length
    # a batch holds at least a whole sequence of the task
    tokens = max(length, int(min(config.loop.batch_size * length, STEP_SECONDS * tokens_per_second)))
    start, measured = time.perf_counter(), []
    lengths = (length, max(1, length // 4), min(4 * length, max(LONGEST, length)))
    for steps in dict.fromkeys(lengths):
        if time.perf_counter() - start > SECONDS or steps > SEQUENCE_SECONDS * tokens_per_second:
            continue
        batch_size = max(1, tokens // steps)
        try:
            found = _measured(config, _random_batch(config, batch_size, steps))
        except (torch.OutOfMemoryError, ValueError):
            found = {"tokens_per_second": None, "step_bytes": None}
        measured.append({"length": steps, "batch_size": batch_size, **found})
    return sorted(measured, key=lambda found: found["length"])


def _measured(config: TrainConfig, batch: Batch) -> dict[str, Any]:
    loop = dataclasses.replace(config.loop, accumulate=1, strategy="auto")
    fabric = make_fabric(loop)
    device = fabric.device
    model = make_model(config.sequence_model)
    objective = fabric.setup_module(Objective(model))
    steppers: Any = [fabric.setup_optimizers(made) for made in make_optimizers(model, config.optim)]
    step = functools.partial(
        train_step,
        *on_device(batch, device),
        fabric=fabric,
        objective=objective,
        optimizers=steppers,
        window=torch.zeros(4, device=device),
        clip_norm=config.optim.clip_norm,
    )
    with matmul_precision(loop.matmul_precision):
        # warm up: compile kernels and create the optimiser's state
        step()
        step_bytes = _step_bytes(step, device)
        _wait(device)
        seconds: list[float] = []
        while sum(seconds) < STEP_SECONDS:
            start = time.perf_counter()
            step()
            _wait(device)
            seconds.append(time.perf_counter() - start)
    tokens = batch.inputs.shape[: 2 + len(_pair(config))].numel()
    return {"tokens_per_second": tokens / statistics.median(seconds), "step_bytes": step_bytes}


def _step_bytes(step: Callable[[], object], device: torch.device) -> int | None:
    """Return the peak memory that a step allocates, in bytes, or None if torch does not track it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    if device.type != "cpu":
        return None
    # the process's peak memory would include everything before this step
    # without `acc_events`, torch 2.11 warns of events that a further cycle would drop
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        step()
    taken = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            taken += event.nbytes()
            most = max(most, taken)
    return most


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _length(config: TrainConfig) -> int:
    """Return the number of steps in a sequence of the task."""
    return config.task.split("train").rows(torch.tensor([0])).inputs.shape[1 + len(_pair(config))]


def _pair(config: TrainConfig) -> tuple[int, ...]:
    """Return the sizes of the input axes between batch and time: (2,) for pairs of sequences, else ()."""
    return (2,) if isinstance(config.task, PairedTask) else ()


def _random_batch(config: TrainConfig, n: int, steps: int) -> Batch:
    """Return random inputs and targets of the task's shapes; their values do not affect the speed."""
    task = config.task
    shape = (n,) if task.per_sequence else (n, steps)
    model = config.sequence_model
    outputs = model.n_outputs or model.vocab_size or 1
    inputs: Tensor
    if task.n_features is None:
        inputs = torch.randint(model.vocab_size or 1, (n, *_pair(config), steps))
    else:
        inputs = torch.randn(n, *_pair(config), steps, task.n_features)
    if task.objective == "regression":
        return Batch(inputs, torch.randn(*shape, outputs), None)
    return Batch(inputs, torch.randint(outputs, shape), None)


def _main(starter: str, folder: str) -> int:
    threading.Thread(target=stop_without, args=(int(starter),), daemon=True).start()
    # wait, because an earlier worker that is about to stop may still be writing its checkpoint
    with locked(Path(folder), wait=True):
        return 0 if run_job(Path(folder)) == "done" else 1


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
