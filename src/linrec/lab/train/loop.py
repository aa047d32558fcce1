"""The training loop."""

import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from linrec.errors import ConfigError, DivergedError, InterruptedRunError, LostProcessError, StepSizeError
from linrec.extras import check_extra
from linrec.lab.tasks import (
    Batch,
    GeneratedTask,
    ProbedTask,
    ResizableTask,
    Source,
    Task,
    WeightedTask,
)
from linrec.lab.train.checkpoint import (
    carried_state,
    check_state,
    check_weights,
    gather_state,
    gather_weights,
    load_best,
    load_checkpoint,
    restore_state,
    restore_weights,
    save_best,
    save_checkpoint,
    unpacked,
)
from linrec.lab.train.config import TrainConfig, config_to_dict
from linrec.lab.train.data import Batches, begins_epoch, staged
from linrec.lab.train.fabric import (
    any_process,
    deterministic,
    expect_skipped,
    first,
    first_ahead,
    is_lost,
    make_fabric,
    make_grid,
    matmul_precision,
    program,
    seed_all,
    seed_dropout,
    uses_compile,
)
from linrec.lab.train.learner import make_step
from linrec.lab.train.optim import cut_warmup, make_optimizers, schedule_factor, set_learning_rate
from linrec.lab.train.progress import Clock, Interrupt, Progress, Reporter
from linrec.lab.train.records import MetricsLog, Result, provenance
from linrec.lab.train.run import RESULT, note_resumed, open_run_folder, read_result, write_json
from linrec.lab.train.start import build_model
from linrec.lab.train.step import (
    Carried,
    Objective,
    evaluate,
    may_skip,
    reads_values,
    train_step,
)
from linrec.models import LanguageModel
from linrec.models.compilation import CapturedStep, compiling
from linrec.ops.nonlinear_scan import OPERATOR, ConvergenceError
from linrec.trees import leaves

NEWTON = {backend.mode for backend in OPERATOR.backends} - {"recurrent"}
_EXACT = (
    " Where iterations of Newton's method do not converge, compiled training has NaN. For the exact loop, "
    "leave out --model.mixer-args.mode."
)
# maximum steps between exchanges of the stop request among processes, which synchronise them
ASK_EVERY = 10


def fit(
    config: TrainConfig,
    out_dir: str | PathLike[str],
    *,
    resume: bool = False,
    progress: Callable[[Progress], None] | None = None,
    command: str | None = None,
    init: nn.Module | None = None,
) -> Result:
    """Train a model on a task, and write configuration, metrics, checkpoints and result to a run folder.

    The trained model is the model of the last step or, with `loop.keep` "best", the model of the lowest
    validation loss. The test split is evaluated once, at the end. The global random states of torch and
    Python are seeded.

    Under torchrun, the processes train a model together, each on its share of every batch. All processes
    return the result and raise each other's errors; only the first process writes files and reports progress.

    Args:
        config: the configuration of the run.
        out_dir: the run folder, created if it does not exist.
        resume: continue the run in `out_dir` from its newest checkpoint, bit for bit on the same device and
            number of processes.
        progress: called every `config.loop.log_every` steps, and at least once a second; and by the signal
            handler, when the run is asked to stop.
        command: the command line to record, if any.
        init: a model of the same configuration whose weights initialise a new run; None initialises randomly.

    Returns:
        Scores, size and speed, which are also written to `out_dir/result.json`.

    Raises:
        ConfigError: the configuration cannot be trained.
        MissingExtraError: the extra "lab" is not installed.
        RunFolderError: `out_dir` is not empty; with `resume`, it does not hold a run of this configuration;
            or another process trains there.
        CheckpointError: a checkpoint could not be written or read, or belongs to another model. Earlier
            checkpoints are untouched.
        DivergedError: the loss, its gradient or a learned step size is not finite, or a step size is zero.
        InterruptedRunError: the run received SIGINT or SIGTERM, and has written a checkpoint.
        LostProcessError: another process was killed; the newest checkpoint is from before.

    Example:
        >>> import tempfile
        >>> from linrec.lab.tasks import MemoryHorizon
        >>> from linrec.lab.train import LoopConfig
        >>> from linrec.models import ModelConfig
        >>> task = MemoryHorizon(length=8, n_resets=1, n_samples=20, n_validation=4, n_test=4)
        >>> model = ModelConfig(vocab_size=6, d_model=8, n_layers=1)
        >>> config = TrainConfig("tiny", task, model, loop=LoopConfig(batch_size=4, device="cpu"))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     fit(config, folder).steps
        3
    """
    check_extra("lab", "training")
    # holds the lock of the run folder
    with ExitStack() as held:
        try:
            return _fit(
                config, Path(out_dir), held, resume=resume, progress=progress, command=command, init=init
            )
        except StepSizeError as error:
            raise DivergedError(
                f"a learned step size is not positive anymore: {error} A smaller --optim.lr or "
                "--optim.transition-lr may help."
            ) from error
        except ConvergenceError as error:
            raise DivergedError(f"a layer's iterations did not converge: {error}{_EXACT}") from error
        except RuntimeError as error:
            if not is_lost(error):
                raise
            raise LostProcessError(
                "another process of the run was killed or cannot be reached; "
                f"continue with: {' '.join(program())} train --resume {out_dir}"
            ) from error


def _fit(
    config: TrainConfig,
    folder: Path,
    held: ExitStack,
    *,
    resume: bool,
    progress: Callable[[Progress], None] | None,
    command: str | None,
    init: nn.Module | None,
) -> Result:
    loop = config.loop
    fabric = make_fabric(loop)
    device, grid = fabric.device, make_grid(fabric, loop.time_parallel)
    seed_all(loop.seed)

    # data, in an order that depends only on seed and epoch
    task = first_ahead(fabric, config.task.prepared)
    config = dataclasses.replace(config, task=task)
    make_batches = functools.partial(
        Batches,
        batch_size=loop.batch_size,
        seed=loop.seed,
        device=device,
        rank=grid.row,
        processes=grid.rows,
        streams=loop.carry_state,
    )
    stages = _stages(task, loop.curriculum, make_batches)
    _, batches = stages[-1]
    if loop.keep == "best" and not len(task.split("validation")):
        raise ConfigError("`loop.keep` = 'best' needs a validation split, but the task's is empty.")
    total_steps = loop.epochs * len(batches) if loop.steps is None else loop.steps
    if stages[-1][0] >= total_steps:
        raise ConfigError(
            f"the stages of `loop.curriculum` must take less than the run's {total_steps} steps; got "
            f"{stages[-1][0]}. The steps after them have the task's own length."
        )
    optim = cut_warmup(config.optim, total_steps)

    # model and optimisers
    model = build_model(config, device, grid.rows, init)
    compiled = config.learner is None and uses_compile(loop, device)
    weights = task.class_weights if isinstance(task, WeightedTask) else ()
    objective: Any = Objective(model, label_smoothing=config.optim.label_smoothing, class_weights=weights)
    firsts = (next(batches.epoch(0)) for _, batches in stages)
    if fabric.world_size > 1 and loop.strategy != "fsdp" and may_skip(fabric, objective, firsts):
        expect_skipped(fabric)
    if compiled:
        held.enter_context(compiling())
        objective.compile()
    objective = fabric.setup_module(objective)
    seed_dropout(loop.seed, fabric.global_rank)
    optimizers = make_optimizers(model, config.optim)
    # sums of loss, accuracy, gradient norm and steps since the last log, kept on the device to avoid syncs
    window = torch.zeros(4, device=device)
    carried = Carried() if loop.carry_state and config.learner is None else None
    steppers: Any = [fabric.setup_optimizers(optimizer) for optimizer in optimizers]
    do_step: Callable[..., None] = functools.partial(
        train_step,
        fabric=fabric,
        objective=objective,
        optimizers=steppers,
        window=window,
        accumulate=loop.accumulate,
        clip_norm=config.optim.clip_norm,
        carried=carried,
        grid=grid,
    )
    learner = None
    if config.learner is not None:
        do_step = learner = make_step(
            config.learner,
            model,
            optimizers,
            window,
            clip_norm=config.optim.clip_norm,
            carry_state=loop.carry_state,
            batch=next(batches.epoch(0)),
            processes=fabric.world_size,
        )
    memory = carried if learner is None else learner
    moving: list[Any] = []
    if learner is None:
        # a learner calls it after each of its updates
        moving = [module for module in model.modules() if hasattr(module, "after_update")]
    if compiled and device.type == "cuda" and fabric.world_size == 1:
        do_step = CapturedStep(
            do_step,
            # the first batch of an epoch also makes the initial state
            unless=lambda *batch: (
                reads_values(model, Batch(*batch)) or (carried is not None and carried.state is None)
            ),
            in_place=None if carried is None else lambda: leaves(carried.state),
        )

    # the run folder, and the step to start from
    origin = {**provenance(device), "processes": fabric.world_size}
    about = {"command": command, "total_steps": total_steps, **origin}
    command = first(fabric, open_run_folder, folder, config, about, held, resume=resume)
    described = {"config": config_to_dict(config), "command": command, **origin}
    checkpoint = first_ahead(fabric, load_checkpoint, folder, set_aside=True) if resume else None
    step, seconds = 0, 0.0
    if checkpoint is not None:
        check_state(checkpoint, folder, model, optimizers, total_steps)
        check_weights(checkpoint, model, folder)
        restore_state(fabric, checkpoint, model, optimizers, window)
        step, seconds = checkpoint.about["step"], checkpoint.about["seconds"]
        if carried is not None and isinstance(model, LanguageModel):
            like = model.init_state(loop.batch_size, device="meta")
            carried.keep(carried_state(checkpoint, like, device))
        if learner is not None:
            stored = unpacked(checkpoint.about["learner"], checkpoint.part("learner."))
            learner.load_state_dict(stored, device)
    if resume and (folder / RESULT).exists():
        return read_result(folder)
    if checkpoint is not None:
        first(fabric, note_resumed, folder, step, origin)
    best_loss, best_step = math.inf, 0
    # a best model without a checkpoint is from before a restart, so it is not a model of this run
    kept = first_ahead(fabric, load_best, folder) if checkpoint is not None and loop.keep == "best" else None
    if kept is not None:
        best_loss, best_step = kept.about["loss"], kept.about["step"]

    def ended() -> bool:
        waits = math.inf if loop.patience is None else loop.patience * loop.eval_every
        return step == total_steps or step - best_step >= waits

    score = functools.partial(
        evaluate, fabric, objective, task, batch_size=loop.batch_size, carry_state=loop.carry_state, grid=grid
    )
    rates = []
    clock = Clock(step=step, seconds=seconds)
    reporter = Reporter(progress if fabric.is_global_zero else None, step, total_steps)
    # only the first process writes files
    metrics_log: Any = first(fabric, MetricsLog, folder, step=step) or nullcontext()
    with (
        deterministic(loop.deterministic),
        matmul_precision(loop.matmul_precision),
        # the first step may compile for minutes, and has nothing to save before its end
        Interrupt(reporter.stop, waits=False) as interrupt,
        metrics_log as log,
    ):
        reporter.start()
        for batch in itertools.islice(staged(stages, step), 0 if ended() else None):
            factor = schedule_factor(step, optim, total_steps)
            set_learning_rate(optimizers, factor)
            if memory is not None and begins_epoch(stages, step):
                memory.clear()
            do_step(*batch)
            interrupt.waits = True
            step += 1
            for module in moving:
                module.after_update(step)
            reporter.step(step)

            place = {"step": step, "epoch": round(step / len(batches), 4)}
            scores: dict[str, Any] = {}
            if step == total_steps or step % loop.eval_every == 0:
                # keep="best" always compares the same batches; keep="last" scores its last step on all
                whole = step == total_steps and loop.keep == "last"
                with clock.paused(), reporter.evaluating():
                    scores = score(task.split("validation"), batches=None if whole else loop.eval_batches)
                    if loop.keep == "best" and scores["loss"] < best_loss:
                        best_loss, best_step = scores["loss"], step
                        about = {"step": step, "loss": best_loss, **described}
                        first(fabric, save_best, folder, gather_weights(fabric, model, about))

            last = ended()
            logs = last or step % loop.log_every == 0
            asks = logs or fabric.world_size == 1 or step % ASK_EVERY == 0
            stop = asks and any_process(fabric, interrupt.requested)
            writes = last or stop or step % loop.checkpoint_every == 0
            if logs or writes:
                _check_finite(window, step, model)

            if logs:
                loss, accuracy, grad_norm = (window[:3] / window[3]).tolist()
                window.zero_()
                rates.append(clock.lap(step))
                right = {"accuracy": accuracy} if task.objective == "classification" else {}
                metrics = {"loss": loss, **right, "grad_norm": grad_norm}
                tokens_per_second = rates[-1] * loop.batch_size * _steps(task, batch)
                speed = {"steps_per_second": rates[-1], "tokens_per_second": tokens_per_second}
                record = {
                    **place,
                    "split": "train",
                    **metrics,
                    "lr": factor * config.optim.lr,
                    **speed,
                    "seconds": clock.seconds,
                }
                first(fabric, MetricsLog.append, log, record)
                reporter.log(step, loss=loss, accuracy=right.get("accuracy"), steps_per_second=rates[-1])

            if scores:
                metrics = {name: scores[name] for name in ("loss", "accuracy") if name in scores}
                record = {**place, "split": "validation", **metrics, "seconds": clock.seconds}
                first(fabric, MetricsLog.append, log, record)

            if writes:
                with clock.paused():
                    position = dict(zip(("epoch", "batch"), divmod(step, len(batches)), strict=True))
                    about = {"step": step, **position, "seconds": clock.seconds, **described}
                    state = gather_state(
                        fabric,
                        model,
                        optimizers,
                        window,
                        about,
                        None if carried is None else carried.state,
                        None if learner is None else learner.state_dict(),
                    )
                    first(fabric, save_checkpoint, folder, state)

            if stop and not last:
                raise InterruptedRunError(
                    f"stopped at step {step} of {total_steps}; "
                    f"continue with: {' '.join(program())} train --resume {folder}"
                )
            if last:
                break

        best = first_ahead(fabric, load_best, folder) if best_step else None
        if best is not None:
            restore_weights(best, model)
        with reporter.evaluating():
            test, validation = score(task.split("test")), score(task.split("validation"))
            if isinstance(task, GeneratedTask) and test:
                test |= task.generated_scores(model.eval(), task.split("test"))
            probes = _probes(task, score, loop.batch_size, grid.rows)
        result = Result(
            test=test,
            validation=validation,
            probes=probes,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            steps=step,
            seconds=clock.seconds,
            steps_per_second=statistics.median(rates) if rates else 0.0,
            best_step=best_step or None,
        )
    about = {"recipe": config.name, "seed": loop.seed, **described}
    if log is not None:
        # so that a shortened log is found
        about["records"] = log.records
    first(fabric, write_json, folder / RESULT, {**dataclasses.asdict(result), **about})
    return result


def _stages(
    task: Task, curriculum: tuple[tuple[int, int], ...], make_batches: Callable[[Source], Batches]
) -> list[tuple[int, Batches]]:
    """Return the first step and the batches of each stage; the last stage has the task's own length."""
    stages, first = [], 0
    for steps, length in curriculum:
        if not isinstance(task, ResizableTask):
            raise ConfigError(
                f"`loop.curriculum` needs a task of any length; {type(task).__name__} has one length. Leave "
                "--loop.curriculum out."
            )
        resized = task.at_length(length)
        sizes = [(each.vocab_size, each.n_outputs) for each in (resized, task)]
        if sizes[0] != sizes[1]:
            raise ConfigError(
                f"a length in `loop.curriculum` must not change the task's {sizes[1][0]} tokens and "
                f"{sizes[1][1]} outputs; length {length} has {sizes[0][0]} and {sizes[0][1]}."
            )
        stages.append((first, make_batches(resized.split("train"))))
        first += steps
    return [*stages, (first, make_batches(task.split("train")))]


def _probes(
    task: Task, score: Callable[..., dict[str, Any]], batch_size: int, processes: int
) -> dict[str, dict[str, Any]]:
    """Return the scores of a task's probes; no batch has more tokens than a training batch."""

    def length(split: Source) -> int:
        return _steps(task, split.rows(torch.tensor([0])))

    scores = {}
    for name, split in task.probes.items() if isinstance(task, ProbedTask) else ():
        n = batch_size * length(task.split("train")) // length(split) // processes
        scores[name] = score(split, batch_size=min(batch_size, max(1, n) * processes))
    return scores


def _steps(task: Task, batch: Batch) -> int:
    """Return the number of steps in a sample, summed over both sequences of a pair."""
    return batch.inputs[0].numel() // (task.n_features or 1)


def _check_finite(window: Tensor, step: int, model: nn.Module) -> None:
    # also checked before a checkpoint is written, because a diverged model must not replace a good checkpoint
    finite = torch.isfinite(window).tolist()
    if not all(finite):
        # the gradient of a finite loss may be infinite, and the weights are already updated with it
        culprit = "loss" if not finite[0] else "gradient"
        raise DivergedError(
            f"the {culprit} is not finite at step {step}; the last checkpoint is from before. "
            "A smaller --optim.lr or --optim.clip-norm 1 may help."
            + _EXACT
            * any(getattr(part, "mode", None) in NEWTON for part in model.modules())
        )
