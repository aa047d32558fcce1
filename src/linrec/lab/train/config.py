"""The configuration of a run: frozen dataclasses that convert to JSON and back without loss."""

import dataclasses
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from linrec.errors import ConfigError, UntrustedCodeError
from linrec.field_types import check_types
from linrec.lab import tasks
from linrec.lab.tasks import ImagesTask, LanguageModeling, PairedTask, SourcedTask, Task
from linrec.lab.train.learner import LearnerConfig
from linrec.models import (
    EncoderDecoder,
    EncoderDecoderConfig,
    ImageClassifier,
    ImageClassifierConfig,
    LanguageModel,
    ModelConfig,
    SequenceClassifier,
    SequenceClassifierConfig,
    StackConfig,
)
from linrec.models.config import complete_mixer_args, mixer_parameters
from linrec.rules import at_least, check_integers, check_numbers, positive, typed

MODELS: dict[type, Any] = {
    ModelConfig: LanguageModel,
    EncoderDecoderConfig: EncoderDecoder,
    SequenceClassifierConfig: SequenceClassifier,
    ImageClassifierConfig: ImageClassifier,
}
"""The class of the model of each class of configurations."""


@dataclass(frozen=True)
class OptimConfig:
    """The optimiser, its schedule, clipping, and smoothing of the loss.

    Args:
        name: "adamw", or "muon": Muon (Jordan et al., 2024) for the matrices of the blocks except transition
            parameters, and AdamW for all other parameters.
        lr: peak learning rate of AdamW.
        transition_lr: peak learning rate of the parameters of the state transition; None uses `lr`.
        muon_lr: peak learning rate of Muon.
        muon_momentum: Muon's momentum, the decay rate of the averaged gradient.
        betas: AdamW's decay rates of the first and second moment.
        weight_decay: decoupled weight decay of matrices and embeddings; no other parameter decays.
        schedule: learning rate after warm-up: a half cosine that falls to `min_lr`, a decay with the inverse
            square root of the step, or constant.
        warmup_steps: steps of linear warm-up to the peak.
        min_lr: final learning rate of the cosine.
        clip_norm: maximum global norm of the gradient; larger gradients are scaled down to it. None disables
            clipping.
        label_smoothing: share of each target class that all classes get evenly, in the loss of training
            alone; 0 disables it.

    Raises:
        ValueError: a value is out of range.

    Example:
        >>> OptimConfig(lr=0.0025, warmup_steps=10_000).schedule
        'cosine'
    """

    name: Literal["adamw", "muon"] = "adamw"
    lr: float = 0.0025
    transition_lr: float | None = None
    muon_lr: float = 0.02
    muon_momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.05
    schedule: Literal["cosine", "inverse-sqrt", "constant"] = "cosine"
    warmup_steps: int = 0
    min_lr: float = 0.0
    clip_norm: float | None = None
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        typed(typing.get_type_hints(OptimConfig), **vars(self))
        positive(lr=self.lr)
        positive(**_fields(self, "transition_lr", "muon_lr", "clip_norm"), or_none=True)
        at_least(0, **_fields(self, "weight_decay", "warmup_steps", "min_lr"))
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"`label_smoothing` must be in [0, 1); got {self.label_smoothing}.")
        if self.schedule == "inverse-sqrt" and not self.warmup_steps:
            raise ValueError(
                '`warmup_steps` must be at least 1 with `schedule="inverse-sqrt"`, whose decay starts at '
                "this step; got 0."
            )
        if self.min_lr > self.lr:
            raise ValueError(f"`min_lr` must be at most `lr` = {self.lr}; got {self.min_lr}.")
        if not 0 <= self.muon_momentum < 1:
            raise ValueError(f"`muon_momentum` must be in [0, 1); got {self.muon_momentum}.")
        # AdamW refuses integers, which a JSON file may hold
        object.__setattr__(self, "betas", tuple(float(beta) for beta in self.betas))
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"`betas` must be two numbers in [0, 1); got {self.betas}.")


@dataclass(frozen=True)
class LoopConfig:
    """Length of training, batches, precision, evaluation and devices.

    Args:
        epochs: passes over the training split; unused if `steps` is given.
        steps: number of steps of the run, over as many epochs as needed.
        curriculum: stages at the start of the run, pairs (number of steps, length of the sequences). With
            `((500, 24), (500, 48))`, the first 500 steps have sequences of 24 tokens, the next 500 of 48.
            They are samples of the same task, or windows of the same text. Scores are of the task's own
            length.
        batch_size: sequences per step. Sequences that do not fill a last batch of an epoch are dropped, so
            all batches have the same shape.
        accumulate: number of micro-batches per step (gradient accumulation), to save memory; the gradient is
            the same.
        recompute: recompute the activations of each block in the backward pass (activation checkpointing), to
            save memory; the gradient is the same.
        precision: float32 throughout, or bfloat16 autocast over float32 parameters.
        matmul_precision: value for `torch.set_float32_matmul_precision`; "high" allows TensorFloat32 on GPUs
            (a mantissa of 10 bits instead of 23), which is several times as fast.
        carry_state: whether each sequence of a batch continues the sequence in the same row of the batch
            before, and begins with its final state, without gradients (truncated backpropagation through
            time). A text is then read in order, as `batch_size` streams; each epoch, and each evaluation,
            begins with empty states.
        seed: seed of initialisation, of the order of the samples and of dropout; the task has its own seed.
        eval_every: steps between evaluations on the validation split.
        eval_batches: number of batches per evaluation, from the start of the split or, with `carry_state`, of
            each of its streams; None takes the whole split. Final scores are always of whole splits.
        keep: the model to keep and to score at the end: "last" is the model of the last step, "best" the
            model of the lowest validation loss, which has its own file.
        patience: number of evaluations in a row without a new best model after which the run stops early;
            None disables early stopping.
        checkpoint_every: steps between checkpoints.
        log_every: steps between log entries, which average over these steps.
        deterministic: prefer deterministic algorithms, at a small cost in speed.
        compile: use torch.compile and, on CUDA with a single process, replay each step as a CUDA graph;
            "auto" does both on CUDA only.
        device: where to train; "auto" takes CUDA, then MPS, then the CPU.
        strategy: how the processes of torchrun share the work: with "ddp", every process has the whole
            model; with "fsdp", every process has a shard of each parameter (FSDP2). "auto" is "ddp" for
            several processes. The processes share each batch of `batch_size` sequences; the gradient is the
            same as with a single process.
        time_parallel: number of processes that share each sequence, which divides the number of processes and
            the length of sequences; for language models. Each of them has consecutive steps of the same
            sequences (`linrec.parallel.time_parallel`); the gradient is the same as with a single process.

    Raises:
        ValueError: a value is out of range.

    Example:
        >>> LoopConfig(epochs=3, batch_size=8, accumulate=2).precision
        '32-true'
    """

    epochs: int = 1
    steps: int | None = None
    curriculum: tuple[tuple[int, int], ...] = ()
    batch_size: int = 32
    accumulate: int = 1
    recompute: bool = False
    carry_state: bool = False
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    matmul_precision: Literal["highest", "high"] = "highest"
    seed: int = 0
    eval_every: int = 500
    eval_batches: int | None = None
    keep: Literal["last", "best"] = "last"
    patience: int | None = None
    checkpoint_every: int = 1000
    log_every: int = 50
    deterministic: bool = True
    compile: Literal["auto", "on", "off"] = "auto"
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    time_parallel: int = 1

    def __post_init__(self) -> None:
        typed(typing.get_type_hints(LoopConfig), **vars(self))
        counts = ("epochs", "batch_size", "accumulate", "eval_every", "checkpoint_every", "log_every")
        at_least(1, time_parallel=self.time_parallel)
        at_least(1, **_fields(self, *counts))
        at_least(1, **_fields(self, "steps", "eval_batches", "patience"), or_none=True)
        at_least(0, seed=self.seed)
        # a JSON file has lists
        object.__setattr__(self, "curriculum", tuple((steps, length) for steps, length in self.curriculum))
        at_least(1, curriculum=min((number for stage in self.curriculum for number in stage), default=1))
        if self.patience is not None and self.keep != "best":
            raise ValueError(
                f"`patience` = {self.patience} needs `keep` = 'best'; got `keep` = {self.keep!r}. "
                "Pass keep='best' too."
            )
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"`accumulate` must divide `batch_size` = {self.batch_size}; got {self.accumulate}."
            )


@dataclass(frozen=True)
class TrainConfig:
    """The complete configuration of a run: task, model, optimiser and training loop.

    The task determines the model's `vocab_size` or `n_features`, `n_outputs` and `pairs`. Some tasks know
    these values only after their data are loaded. `mixer_args` is completed with the mixer's defaults,
    so that a stored configuration is complete.

    Args:
        name: name of the recipe.
        task: a task's dataclass, such as `linrec.lab.tasks.MemoryHorizon()`.
        model: the model's configuration: an `ImageClassifierConfig` for an `ImagesTask`; an
            `EncoderDecoderConfig` for a `SourcedTask`; a `SequenceClassifierConfig` if the task is
            `per_sequence` or has `n_features`; or a `ModelConfig`.
        optim: optimiser and schedule.
        loop: epochs, batches, precision, seed, device.
        learner: the learner that takes the training steps; None is backpropagation through whole sequences.

    Raises:
        ValueError: the mixer does not exist, or has no argument of a given name.
        ConfigError: Muon is combined with `strategy` "fsdp"; `model` has the wrong type for the task;
            `recompute` is set for a classifier; `carry_state` is set for another task than a text, or with
            micro-batches; the pooling does not fit the task's targets; or `loop` asks for what a learner does
            not do.

    Example:
        >>> from linrec.lab.tasks import MemoryHorizon
        >>> config = TrainConfig("small", MemoryHorizon(modulus=10), ModelConfig(vocab_size=1))
        >>> config.model.vocab_size, config.model.n_outputs
        (6, 10)
        >>> config_from_dict(config_to_dict(config)) == config
        True
    """

    name: str
    task: Task
    model: ModelConfig | SequenceClassifierConfig | ImageClassifierConfig
    optim: OptimConfig = field(default_factory=OptimConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    learner: LearnerConfig | None = None

    def __post_init__(self) -> None:
        check_numbers(dataclasses.asdict(self))
        if self.optim.name == "muon" and self.loop.strategy == "fsdp":
            raise ConfigError(
                "Muon needs whole matrices, but `loop.strategy` fsdp shards them over the processes; pass "
                "--loop.strategy ddp, or --optim.name adamw."
            )
        needed = model_type(self.task)
        if not isinstance(self.model, needed):
            raise ConfigError(
                f"`model` must be a {needed.__name__} for the task {type(self.task).__name__}; "
                f"got a {type(self.model).__name__}."
            )
        if self.loop.recompute and needed is not ModelConfig:
            raise ConfigError(
                "`loop.recompute` is for language models, and this model is a classifier; "
                "leave --loop.recompute out, and save memory with --loop.accumulate."
            )
        if self.loop.carry_state and not isinstance(self.task, LanguageModeling):
            raise ConfigError(
                "`loop.carry_state` needs a text, whose windows follow each other; the sequences of "
                f"{type(self.task).__name__} do not. Leave --loop.carry-state out."
            )
        if self.loop.carry_state and self.loop.accumulate > 1:
            raise ConfigError(
                "`loop.accumulate` must be 1 with `loop.carry_state`, whose state is of a whole batch; got "
                f"{self.loop.accumulate}. Save memory with --loop.recompute."
            )
        if isinstance(self.model, SequenceClassifierConfig):
            if self.task.per_sequence and self.model.pooling == "none":
                raise ConfigError(
                    "`model.pooling` must be 'mean' or 'last', because the task has a target per sequence; "
                    "got 'none', which gives an output per step."
                )
            if not self.task.per_sequence and self.model.pooling != "none":
                raise ConfigError(
                    "`model.pooling` must be 'none', because the task has a target per step; got "
                    f"{self.model.pooling!r}, which gives an output per sequence."
                )
        if self.model.reversible and self.loop.strategy == "fsdp":
            raise ConfigError(
                "`model.reversible` must be False with `loop.strategy` = 'fsdp', which gathers parameters of "
                "whole blocks; got True. Leave it out, or train with --loop.recompute."
            )
        if self.optim.label_smoothing and (self.learner is not None or self.task.objective == "regression"):
            raise ConfigError(
                "`optim.label_smoothing` must be 0 for a regression and with a learner, whose losses have no "
                f"smoothed classes; got {self.optim.label_smoothing}. Leave --optim.label-smoothing out."
            )
        if isinstance(self.model, EncoderDecoderConfig) and self.model.memory.kind != "none":
            raise ConfigError(
                "`model.memory.kind` must be 'none' for sources of any length, which are not whole segments; "
                f"got {self.model.memory.kind!r}. Leave --model.memory out."
            )
        if self.learner is not None and isinstance(self.task, SourcedTask):
            raise ConfigError(
                "`learner` must be None for an encoder-decoder, whose sources learners do not read; got "
                f"{self.learner.learner!r}. Leave --learner out."
            )
        if self.learner is not None:
            self.learner.check_loop(self.loop)
        completed = dataclasses.replace(
            self.model,
            **values_from_task(self.task),
            **encoders_of(self.model, self.task),
            mixer_args=complete_mixer_args(self.model.mixer, self.model.mixer_args),
        )
        # the documented way for a frozen dataclass to derive its own fields
        object.__setattr__(self, "model", completed)

    @property
    def sequence_model(self) -> ModelConfig | SequenceClassifierConfig:
        """The model's configuration.

        Raises:
            ConfigError: the model is a classifier of images.
        """
        if isinstance(self.model, ImageClassifierConfig):
            raise ConfigError(f"{self.name} trains a classifier of images; this needs a model of sequences.")
        return self.model

    @property
    def import_paths(self) -> set[str]:
        """The import paths, of the task and of mixers, that reading the stored configuration would import."""
        task = tasks.name_of(type(self.task))
        return self.model.import_paths | ({task} if ":" in task else set())


def model_type(
    task: Task,
) -> type[ModelConfig] | type[SequenceClassifierConfig] | type[ImageClassifierConfig]:
    """Return the class of the model configuration that a task needs."""
    if isinstance(task, SourcedTask):
        return EncoderDecoderConfig
    if isinstance(task, ImagesTask):
        return ImageClassifierConfig
    return ModelConfig if task.n_features is None and not task.per_sequence else SequenceClassifierConfig


def make_model(
    config: ModelConfig | SequenceClassifierConfig | ImageClassifierConfig,
) -> LanguageModel | SequenceClassifier | ImageClassifier:
    """Return a new model of a configuration."""
    return MODELS[type(config)](config)


def encoders_of(model: StackConfig, task: Task) -> dict[str, Any]:
    """Return the encoders of a model with the values that the task determines; {} for other models."""
    if not isinstance(model, EncoderDecoderConfig) or not isinstance(task, SourcedTask):
        return {}
    return {
        name: dataclasses.replace(
            encoder,
            vocab_size=task.source_vocab_size or 1,
            mixer_args=complete_mixer_args(encoder.mixer, encoder.mixer_args),
        )
        for name, encoder in (("encoder", model.encoder), ("second", model.second))
        if encoder is not None
    }


def values_from_task(task: Task) -> dict[str, Any]:
    """Return the fields of the model configuration that the task determines."""
    if isinstance(task, ImagesTask):
        return {"n_outputs": task.n_outputs}
    # 1 is a placeholder until the data are loaded
    vocab_size = None if task.n_features is not None else task.vocab_size or 1
    values = {"vocab_size": vocab_size, "n_outputs": task.n_outputs}
    if issubclass(model_type(task), ModelConfig):
        return values
    return {**values, "n_features": task.n_features, "pairs": isinstance(task, PairedTask)}


def config_to_dict(config: TrainConfig) -> dict[str, Any]:
    """Return the configuration as JSON values; the task's fields include the task's name or import path."""
    task_name = tasks.name_of(type(config.task))
    fields = dataclasses.asdict(config)
    paths = {name: str(value) for name, value in fields["task"].items() if isinstance(value, Path)}
    fields["task"] = {"name": task_name, **fields["task"], **paths}
    if config.learner is None:
        del fields["learner"]
    return fields


def config_from_dict(stored: Any, *, trust_code: bool | Collection[str] = False) -> TrainConfig:
    """Return the configuration that `config_to_dict` stored; see `load_run` for `trust_code`.

    Any other error than UntrustedCodeError is a ConfigError, as of a field that this version does not have.
    """
    try:
        check_types({"config": dict}, {"config": stored})
        fields = lists_to_tuples(stored)
        check_types({"name": str, **dict.fromkeys(("task", "model", "optim", "loop"), dict)}, fields)
        check_integers(fields)
        values = dict(fields["task"])
        check_types({"name": str}, values, "task.")
        task_name = values.pop("name")
        check_trusted("task", {task_name} if ":" in task_name else (), trust_code)
        task_type = tasks.get(task_name)
        task = task_type(**_checked(task_type, values, "task."))
        shape = model_type(task)
        model = shape(**_checked(shape, fields["model"], "model."))
        check_trusted("mixer", model.import_paths, trust_code)
        learner = fields.get("learner")
        for stack in (model, *encoders_of(model, task).values()):
            _check_mixers(stack)
        return TrainConfig(
            name=fields["name"],
            task=task,
            model=model,
            optim=OptimConfig(**_checked(OptimConfig, fields["optim"], "optim.")),
            loop=LoopConfig(**_checked(LoopConfig, fields["loop"], "loop.")),
            learner=learner and LearnerConfig(**_checked(LearnerConfig, learner, "learner.")),
        )
    except UntrustedCodeError:
        raise
    except KeyError as error:
        raise ConfigError(
            f"the stored configuration does not fit this version of linrec: it has no {error}."
        ) from error
    except (AttributeError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise ConfigError(f"the stored configuration does not fit this version of linrec: {error}") from error


def _check_mixers(stack: StackConfig) -> None:
    """Raise TypeError if an argument of a mixer has the wrong type."""
    for mixer in dict.fromkeys(stack.mixer_pattern):
        arguments = stack.mixer_args if isinstance(stack.mixer, str) else stack.mixer_args.get(mixer, {})
        hints = {name: parameter.annotation for name, parameter in mixer_parameters(mixer).items()}
        check_types(hints, arguments, f"{mixer}.")


def _checked(kind: type, values: dict[str, Any], section: str) -> dict[str, Any]:
    check_types(typing.get_type_hints(kind), values, section)
    return values


def check_trusted(kind: str, paths: Collection[str], trust_code: bool | Collection[str]) -> None:
    """Raise UntrustedCodeError for an import path that is not trusted, before the code is imported."""
    for name in sorted(paths):
        if trust_code is not True and (trust_code is False or name not in trust_code):
            raise UntrustedCodeError(
                f"the {kind} {name!r} is code outside of linrec, and loading the configuration would run it. "
                "Pass --trust-code, or `trust_code=True` in Python, if you trust the code and the folder."
            )


def differences(one: TrainConfig, other: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Return the two values of every field in which two configurations differ, by dotted name."""
    left, right = flattened(config_to_dict(one)), flattened(config_to_dict(other))
    names = [*left, *(name for name in right if name not in left)]
    return {name: (left.get(name), right.get(name)) for name in names if left.get(name) != right.get(name)}


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dictionaries as a flat dictionary with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= flattened(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def lists_to_tuples(value: Any) -> Any:
    """Return JSON values with tuples in place of lists: configurations hold tuples only."""
    if isinstance(value, list):
        return tuple(lists_to_tuples(item) for item in value)
    if isinstance(value, dict):
        return {name: lists_to_tuples(item) for name, item in value.items()}
    return value


def _fields(config: object, *names: str) -> dict[str, Any]:
    """Return fields by name, as keyword arguments for the checks of `linrec.rules`."""
    return {name: getattr(config, name) for name in names}
