"""One training step, its replay as a CUDA graph, and evaluation."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int64, Num
from torch import Tensor, nn
from torch.nn import functional as F

from linrec.models import LanguageModel, SequenceClassifier
from linrec.nn.cross_entropy import linear_cross_entropy
from linrec.tasks import NO_TARGET, Batch, ScoredTask, Source, Task, has_target
from linrec.train.data import on_device
from linrec.train.fabric import Fabric
from linrec.train.optim import gradient_norm
from linrec.train.processes import gathered, summed

EAGER_STEPS = 3


class Outcome(NamedTuple):
    """What the objective returns.

    Args:
        loss: cross-entropy in nats, or squared error of real numbers, summed over all targets: a scalar.
        correct: number of targets that are predicted right, 0 where they are real numbers: a scalar.
        predictions: the likeliest class at every position, shape (b, t), int64; or of every sequence, (b).
            Real numbers of the shape of the targets where those are such.
    """

    loss: Float[Tensor, ""]
    correct: Int64[Tensor, ""]
    predictions: Int64[Tensor, "b *t"] | Float[Tensor, "b *t f"]


class Objective(nn.Module):
    """A model and its loss in one module, so that they are distributed as one.

    The loss is a sum. Its user divides by the number of targets of the whole batch, which makes a batch taken
    in pieces, or by several processes, the same as the batch at once. Targets of real numbers make it a
    squared error, of which each number counts as a target.

    Args:
        model: the model; the logits of a large vocabulary are never all in memory. A classifier has one
            target per sequence, or without pooling per step.
    """

    def __init__(self, model: LanguageModel | SequenceClassifier) -> None:
        super().__init__()
        self.model = model
        self.scored: Callable[[Tensor, Tensor], Outcome] = self._scored

    def forward(
        self,
        inputs: Num[Tensor, "b t *f"],
        targets: Num[Tensor, "b *n"],
        reset: Bool[Tensor, "b t"] | None = None,
        lengths: Int64[Tensor, "b *pair"] | None = None,
    ) -> Outcome:
        """Return loss and predictions; positions whose target is -100, or NaN, count for neither."""
        if isinstance(self.model, SequenceClassifier):
            return self.scored(self.model(inputs, lengths=lengths), targets)
        x, _ = self.model.hidden(inputs, reset=reset)
        return self.scored(x, targets)

    def compile(self, **options: Any) -> None:
        """Compile each block of the model and the loss; the options are those of `torch.compile`.

        Blocks of equal structure share one compilation, so that the first step of a deep model takes no
        longer than that of a shallow one. Run the steps inside of `linrec.train.state.compiling`.
        """
        for block in self.model.blocks:
            block.compile(**options)
        self.scored = torch.compile(self._scored, **options)

    def _scored(self, x: Tensor, targets: Tensor) -> Outcome:
        """Return the outcome for what the head of a language model reads, or for a classifier's outputs."""
        if isinstance(self.model, LanguageModel):
            head = self.model.head
            loss, predictions = linear_cross_entropy(x, head.weight, head.bias, targets, cap=head.cap)
            return Outcome(loss, (predictions == targets).sum(), predictions)
        outputs = x.float()
        if targets.is_floating_point():
            # a difference from NaN would make the gradient NaN, even where it is masked afterwards
            error = (outputs - targets.nan_to_num(0.0)) * has_target(targets)
            return Outcome(error.square().sum(), targets.new_zeros((), dtype=torch.int64), outputs)
        loss = F.cross_entropy(
            outputs.flatten(0, -2), targets.flatten(), ignore_index=NO_TARGET, reduction="sum"
        )
        predictions = outputs.argmax(-1)
        return Outcome(loss, (predictions == targets).sum(), predictions)


def train_step(
    inputs: Num[Tensor, "b t *f"],
    targets: Num[Tensor, "b *n"],
    reset: Bool[Tensor, "b t"] | None,
    lengths: Int64[Tensor, "b *pair"] | None = None,
    *,
    fabric: Fabric,
    objective: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    window: Float[Tensor, "4"],
    accumulate: int = 1,
    clip_norm: float | None = None,
) -> None:
    """Move the parameters once: forward, loss, backward, clip, step; nothing waits for the device.

    Several processes take one step together, each with its share of the batch.

    Args:
        inputs: tokens, or features, of this process's share of the batch.
        targets: their targets, -100 or NaN where there is none.
        reset: true where a document begins, or None.
        lengths: steps of each sequence where padding follows them, or None.
        fabric: runs the backward pass, and knows the other processes.
        objective: an `Objective` that Fabric has set up.
        optimizers: what Fabric has set up.
        window: (loss, accuracy, gradient norm, 1) of this step is added to it; all are of the whole batch.
            The accuracy of real numbers is 0.
        accumulate: pieces that the share is taken in; the gradient is that of the whole batch.
        clip_norm: largest norm of the gradient; None never clips.
    """
    n_targets = summed(fabric, has_target(targets).sum()).clamp(min=1)
    # what the processes average is their sum, so that each divides by its part of the targets alone
    n_targets_each = n_targets / fabric.world_size
    loss, correct = window.new_zeros(()), window.new_zeros(())
    for optimizer in optimizers:
        optimizer.zero_grad()
    parts = [
        (None,) * accumulate if tensor is None else tensor.chunk(accumulate)
        for tensor in (inputs, targets, reset, lengths)
    ]
    for place, piece in enumerate(zip(*parts, strict=True), start=1):
        # the processes exchange gradients once, with the last piece
        with fabric.no_backward_sync(objective, enabled=place < accumulate):  # type: ignore[arg-type]
            outcome = objective(*piece)
            fabric.backward(outcome.loss / n_targets_each)
        loss, correct = loss + outcome.loss.detach(), correct + outcome.correct
    parameters = list(objective.parameters())
    norm = gradient_norm(parameters)
    if clip_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)
    for optimizer in optimizers:
        optimizer.step()
    loss, correct = summed(fabric, torch.stack([loss, correct])) / n_targets
    window += torch.stack([loss, correct, norm, torch.ones_like(norm)])


@torch.no_grad()
def evaluate(
    fabric: Fabric,
    objective: nn.Module,
    task: Task,
    split: Source,
    *,
    batch_size: int,
    batches: int | None = None,
) -> dict[str, Any]:
    """Score the model on a split; several processes share each batch, and all return the scores.

    Args:
        fabric: knows the device and the other processes.
        objective: an `Objective` that Fabric has set up; it is left in training mode.
        task: says how predictions are scored.
        split: the samples.
        batch_size: sequences at once, of all processes together.
        batches: how many batches, from the first; None takes the whole split.

    Returns:
        "loss", the mean over all targets in nats, and "accuracy"; or "loss" alone, the mean squared error of
        a regression. With the whole split, also what the task's `score` returns, where it has one. Nothing
        where the split is empty.
    """
    if not len(split):
        return {}
    device, processes = fabric.device, fabric.world_size
    # loss, right predictions, targets: on the device, so that no batch waits
    sums = torch.zeros(3, device=device, dtype=torch.float64 if device.type != "mps" else torch.float32)
    scored = task if isinstance(task, ScoredTask) and batches is None else None
    predictions = []
    objective.eval()
    for index in torch.arange(len(split)).split(batch_size)[:batches]:
        mine = split.rows(index[fabric.global_rank :: processes])
        batch = on_device(_filled(mine, batch_size // processes), device)
        outcome = objective(*batch)
        sums += torch.stack([outcome.loss, outcome.correct, has_target(batch.targets).sum()])
        if scored is not None:
            # sequences are dealt out in turn
            dealt = torch.stack(gathered(fabric, outcome.predictions), dim=1).flatten(0, 1)
            predictions.append(dealt[: len(index)].cpu())
    objective.train()
    loss, correct, n_targets = summed(fabric, sums).tolist()
    scores = {"loss": loss / max(1, n_targets)}
    if task.objective == "classification":
        scores["accuracy"] = correct / max(1, n_targets)
    if scored is not None:
        scores |= scored.score(torch.cat(predictions), split)
    return scores


def _filled(batch: Batch, batch_size: int) -> Batch:
    # with sequences without targets: compiled code sees one shape only
    missing = batch_size - len(batch.inputs)

    def filled(tensor: Tensor, value: float = 0) -> Tensor:
        # torch counts axes from the last one
        return F.pad(tensor, (*(0, 0) * (tensor.ndim - 1), 0, missing), value=value)

    inputs, targets, reset, lengths = batch
    return Batch(
        filled(inputs),
        filled(targets, math.nan if targets.is_floating_point() else NO_TARGET),
        None if reset is None else filled(reset),
        # no sequence is empty
        None if lengths is None else filled(lengths, 1),
    )


class CapturedStep:
    """A training step that is recorded once as a CUDA graph and replayed: one launch instead of hundreds.

    The first calls run the step as it is, which lets compilers and tuners do their work and makes the
    optimiser's state; the next call records it. The step must take tensors of the same shapes, or None in the
    same places, at every call, return nothing, and keep what it changes in place.

    Args:
        step: a function of tensors on a CUDA device.
    """

    def __init__(self, step: Callable[..., None]) -> None:
        self._step = step
        self._calls = 0
        self._stream = torch.cuda.Stream()
        self._graph = torch.cuda.CUDAGraph()
        self._arguments: tuple[Tensor | None, ...] = ()

    def __call__(self, *arguments: Tensor | None) -> None:
        """Run the step once."""
        self._calls += 1
        if self._calls <= EAGER_STEPS:
            # on the stream that will record: autograd remembers where it made what it reuses
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                self._step(*arguments)
            torch.cuda.current_stream().wait_stream(self._stream)
            return
        if not self._arguments:
            self._arguments = tuple(None if a is None else a.clone() for a in arguments)
            with torch.cuda.graph(self._graph, stream=self._stream):
                self._step(*self._arguments)
        for static, argument in zip(self._arguments, arguments, strict=True):
            if static is not None and argument is not None:
                static.copy_(argument)
        self._graph.replay()
