"""Training steps by a learner of `linrec.learning`, in place of `linrec.lab.train.step.train_step`."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Bool, Float, Int64, Num
from torch import Tensor, nn

from linrec import learning
from linrec.errors import ConfigError
from linrec.lab.tasks import NO_TARGET, Batch, has_target
from linrec.learning import Learner, Piece, step_losses
from linrec.rules import at_least, choice
from linrec.trees import Tree, leaves, map_tree

__all__ = ["LearnerConfig", "LearnerStep", "flat_memory", "make_step", "whole_memory"]

Update: TypeAlias = Literal["chunk", "sequence"]
# arguments of learners that have other options in training
ELSEWHERE = {"clip_norm": "--optim.clip-norm", "update_every": "--update and --chunk"}


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """The learner that takes the training steps, and how a batch of sequences goes through it.

    The batch is learnt in chunks of time, from the first step to the last. With `loop.carry_state`, the
    learner's memory passes from batch to batch; otherwise each batch begins with the memory of a new learner.

    Args:
        learner: name of the learner, from `linrec.learning.names()`.
        learner_args: arguments of the learner.
        chunk: steps that are learnt at a time; None takes the whole sequence.
        update: when the parameters change: after each "chunk" that has targets, or after the "sequence", by
            the gradients of all of its chunks.

    Raises:
        ValueError: an unknown learner, a chunk of less than one step, or a chunk for a learner that needs
            whole sequences.

    Example:
        >>> LearnerConfig(learner="rtrl", chunk=64).update
        'chunk'
    """

    learner: str
    learner_args: dict[str, Any] = field(default_factory=dict)
    chunk: int | None = None
    update: Update = "chunk"

    def __post_init__(self) -> None:
        kind = learning.get(self.learner)
        at_least(1, chunk=self.chunk, or_none=True, cure="None takes the whole sequence.")
        choice(Update, update=self.update)
        for name in ELSEWHERE.keys() & self.learner_args:
            raise ValueError(f"`learner_args` must not have `{name}` in training. Pass {ELSEWHERE[name]}.")
        if self.chunk is not None and kind.chunk_only is not None:
            raise ValueError(
                f"`chunk` must be None for `{self.learner}`; got {self.chunk}: {kind.chunk_only} Leave "
                "--chunk out, or take --learner tbptt."
            )

    def check_loop(self, loop: Any) -> None:
        """Raise ConfigError if a `LoopConfig` asks for what learners do not do."""
        if loop.carry_state and learning.get(self.learner).chunk_only is not None:
            raise ConfigError(
                f"`loop.carry_state` needs a learner with a memory; `{self.learner}` begins each sequence "
                "anew. Take --learner tbptt, or leave --loop.carry-state out."
            )
        plain = {
            "accumulate": (1, "Save memory with a smaller --chunk."),
            "recompute": (False, "Save memory with a smaller --chunk."),
            "precision": ("32-true", "Traces need the digits of float32."),
        }
        for name, (value, cure) in plain.items():
            if (got := getattr(loop, name)) != value:
                raise ConfigError(f"`loop.{name}` must be {value!r} with a learner; got {got!r}. {cure}")
        if loop.compile == "on":
            raise ConfigError(
                "`loop.compile` must be 'auto' or 'off' with a learner, whose steps are not compiled; got "
                "'on'. Leave --loop.compile out."
            )


class LearnerStep:
    """A training step by a learner, with the arguments of a batch.

    Args:
        learner: the learner, with the optimisers of its model.
        config: chunks and updates.
        window: running sums; a step adds (loss, accuracy, gradient norm, 1) of its batch. The norm is the
            mean over the updates.
        carry_state: whether the memory passes from batch to batch.
    """

    def __init__(
        self, learner: Learner, config: LearnerConfig, window: Float[Tensor, "4"], *, carry_state: bool
    ) -> None:
        self._learner, self._config, self._window = learner, config, window
        self._carries = carry_state

    def __call__(self, *parts: Num[Tensor, "b *shape"] | None) -> None:
        """Learn from the fields of a `Batch`."""
        inputs, targets, reset, lengths, *_ = Batch(*parts)  # type: ignore[arg-type]
        if not self._carries:
            self.clear()
        piece, n_targets = as_piece(inputs, targets, reset, lengths), has_target(targets).sum().clamp(min=1)
        loss, correct = self._window.new_zeros(()), self._window.new_zeros(())
        norms: list[Tensor] = []
        time = inputs.shape[1]
        size = time if self._config.chunk is None else self._config.chunk
        for start in range(0, time, size):
            part = Piece(*(None if x is None else x[:, start : start + size] for x in piece))  # type: ignore[arg-type]
            step = self._learner.chunk(*part, update=False)
            loss += self._learner.weighted(step.loss, part.weight)
            if not targets.is_floating_point():
                correct += (step.prediction.argmax(-1) == part.targets).sum()
            if self._config.update == "chunk" or start + size >= time:
                norm = self._learner.update()
                norms += [] if norm is None else [norm]
        norm = torch.stack(norms).mean() if norms else torch.zeros_like(loss)
        self._window += torch.stack([loss / n_targets, correct / n_targets, norm, torch.ones_like(loss)])

    def clear(self) -> None:
        """Let the next batch begin with the memory of a new learner."""
        self._learner.reset()
        # windows are counted from the start of a sequence
        self._learner.steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers of steps, updates and rows, and the memory if batches carry it."""
        memory = flat_memory(self._learner.memory if self._carries else None)
        counts = {"steps": self._learner.steps, "updates": self._learner.updates}
        return counts | {"rows": self._learner.n_rows, "memory": memory}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Go on where another step was when it returned `state_dict()`."""
        self._learner.steps, self._learner.updates = state["steps"], state["updates"]
        memory = whole_memory(self._learner, state["memory"], state["rows"])
        self._learner.memory = map_tree(lambda tensor: tensor.to(device), memory)


def make_step(
    config: LearnerConfig,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    window: Float[Tensor, "4"],
    *,
    clip_norm: float | None,
    carry_state: bool,
    batch: Batch,
    processes: int,
) -> LearnerStep:
    """Return the training step of a run, or raise ConfigError if the learner cannot train its model.

    The step clips the gradients of each update to `clip_norm`. `batch` is any batch of the run.
    """
    if processes > 1:
        raise ConfigError(
            f"a learner trains in a single process; got {processes}. Start linrec without torchrun, or leave "
            "--learner out."
        )
    if batch.dt is not None:
        raise ConfigError(
            "a learner takes regular steps, but the task gives the time between steps. Leave "
            "--task.with-dt out, or train without --learner."
        )
    try:
        learner = learning.build_learner(
            config.learner, model, optimizers, loss=_losses, clip_norm=clip_norm, **config.learner_args
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"`{config.learner}` cannot train this model: {error}") from error
    return LearnerStep(learner, config, window, carry_state=carry_state)


def flat_memory(memory: Mapping[str, Tree] | None) -> dict[str, Tree] | None:
    """Return a learner's memory with the tensors of the model's state as a list.

    A file cannot tell of which class a mixer's state is.
    """
    return None if memory is None else {**memory, "state": leaves(memory["state"])}


def whole_memory(
    learner: Learner, memory: Mapping[str, Tree] | None, rows: int | None
) -> dict[str, Tree] | None:
    """Return the memory of `rows` streams that `flat_memory` made flat."""
    if memory is None or rows is None:
        return None
    kept: Iterable[Tensor] = iter(memory["state"])
    like = learner.first_memory(rows, torch.device("meta"))["state"]
    return {**memory, "state": map_tree(lambda _: next(kept), like)}  # type: ignore[call-overload]


def as_piece(
    inputs: Num[Tensor, "b t *f"],
    targets: Num[Tensor, "b *n"],
    reset: Bool[Tensor, "b t"] | None,
    lengths: Int64[Tensor, "b"] | None = None,
) -> Piece:
    """Return a batch as a piece of streams: each step has a weight, its number of targets.

    The target of a whole sequence is that of its last step. Real targets become pairs (number, whether it
    counts), in a last axis. Steps of padding have inputs of 0.
    """
    rows, time = inputs.shape[:2]
    is_real = targets.is_floating_point()
    if targets.ndim == (2 if is_real else 1):
        last = inputs.new_full((rows,), time - 1, dtype=torch.int64) if lengths is None else lengths - 1
        spread = targets.new_full((rows, time, *targets.shape[1:]), math.nan if is_real else NO_TARGET)
        spread[torch.arange(rows, device=targets.device), last.to(targets.device)] = targets
        targets = spread
    if lengths is not None:
        padding = torch.arange(time, device=inputs.device) >= lengths.to(inputs.device)[:, None]
        inputs = inputs.masked_fill(padding.view(rows, time, *[1] * (inputs.ndim - 2)), 0)
    counts = has_target(targets)
    if is_real:
        targets = torch.stack([targets.nan_to_num(0.0), counts.to(targets.dtype)], -1)
        counts = counts.sum(-1)
    return Piece(inputs, targets, reset, counts.to(torch.float32))


def _losses(
    prediction: Float[Tensor, "b t n"], targets: Int64[Tensor, "b t"] | Float[Tensor, "b t n two"]
) -> Float[Tensor, "b t"]:
    """Return the loss of each step per target: cross-entropy, or squared error of the pairs of `as_piece`."""
    prediction = prediction.float()
    if not targets.is_floating_point():
        return step_losses(prediction, targets)
    numbers, counts = targets.unbind(-1)
    return ((prediction - numbers).square() * counts).sum(-1) / counts.sum(-1).clamp(min=1)
