"""One training step, its replay as a CUDA graph, and evaluation."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from linrec.tasks import NO_TARGET, SplitName, Task
from linrec.train.fabric import Fabric
from linrec.train.optim import gradient_norm

EAGER_STEPS = 3


class Outcome(NamedTuple):
    """What the objective returns.

    Args:
        loss: cross-entropy in nats, summed over all positions that have a target: a scalar.
        correct: number of those positions that are predicted right: a scalar.
        predictions: the likeliest class at every position, shape (b, t), int64.
    """

    loss: Float[Tensor, ""]
    correct: Int64[Tensor, ""]
    predictions: Int64[Tensor, "b t"]


class Objective(nn.Module):
    """A model and its loss in one module, so that they are compiled, and later distributed, as one.

    The loss is a sum. Its user divides by the number of targets of the whole batch, which makes a batch taken
    in pieces the same as the batch at once.

    Args:
        model: maps tokens (b, t) to (logits (b, t, n), state).
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Int64[Tensor, "b t"], targets: Int64[Tensor, "b t"]) -> Outcome:
        """Return loss and predictions; positions whose target is -100 count for neither."""
        logits, _ = self.model(inputs)
        loss = F.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), ignore_index=NO_TARGET, reduction="sum"
        )
        predictions = logits.detach().argmax(-1)
        return Outcome(loss, (predictions == targets).sum(), predictions)


def train_step(
    inputs: Int64[Tensor, "b t"],
    targets: Int64[Tensor, "b t"],
    *,
    fabric: Fabric,
    objective: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    window: Float[Tensor, "4"],
    accumulate: int = 1,
    clip_norm: float | None = None,
) -> None:
    """Move the parameters once: forward, loss, backward, clip, step; nothing waits for the device.

    Args:
        inputs: tokens of the whole batch.
        targets: targets of the whole batch, -100 where there is none.
        fabric: runs the backward pass.
        objective: an `Objective` that Fabric has set up.
        optimizers: what Fabric has set up.
        window: (loss, accuracy, gradient norm, 1) of this step is added to it.
        accumulate: pieces that the batch is taken in; the gradient is that of the whole batch.
        clip_norm: largest norm of the gradient; None never clips.
    """
    n_targets = (targets != NO_TARGET).sum().clamp(min=1)
    loss, correct = window.new_zeros(()), window.new_zeros(())
    for optimizer in optimizers:
        optimizer.zero_grad()
    for piece in zip(inputs.chunk(accumulate), targets.chunk(accumulate), strict=True):
        outcome = objective(*piece)
        fabric.backward(outcome.loss / n_targets)
        loss, correct = loss + outcome.loss.detach(), correct + outcome.correct
    parameters = list(objective.parameters())
    norm = gradient_norm(parameters)
    if clip_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)
    for optimizer in optimizers:
        optimizer.step()
    window += torch.stack([loss / n_targets, correct / n_targets, norm, torch.ones_like(norm)])


@torch.no_grad()
def evaluate(objective: nn.Module, task: Task, name: SplitName, *, batch_size: int) -> dict[str, Any]:
    """Score the model on a whole split.

    Args:
        objective: an `Objective`, on the device that it computes on; it is left in training mode.
        task: has the samples, and says how predictions are scored.
        name: which split.
        batch_size: sequences at once.

    Returns:
        "loss", the mean over all targets in nats, and what `task.score` returns.
    """
    split = task.split(name)
    device = next(objective.parameters()).device
    objective.eval()
    loss, predictions = torch.zeros((), device=device), []
    # the last batch is filled up with sequences without targets: compiled code sees one shape only
    missing = -len(split) % batch_size
    all_inputs = F.pad(split.inputs, (0, 0, 0, missing))
    all_targets = F.pad(split.targets, (0, 0, 0, missing), value=NO_TARGET)
    for inputs, targets in zip(all_inputs.split(batch_size), all_targets.split(batch_size), strict=True):
        outcome = objective(inputs.to(device), targets.to(device))
        loss += outcome.loss
        predictions.append(outcome.predictions)
    objective.train()
    n_targets = max(1, int((split.targets != NO_TARGET).sum()))
    scores = task.score(torch.cat(predictions)[: len(split)].cpu(), split)
    return {"loss": loss.item() / n_targets, **scores}


class CapturedStep:
    """A training step that is recorded once as a CUDA graph and replayed: one launch instead of hundreds.

    The first calls run the step as it is, which lets compilers and tuners do their work and makes the
    optimiser's state; the next call records it. The step must take tensors of the same shapes at every call,
    return nothing, and keep what it changes in place.

    Args:
        step: a function of tensors on a CUDA device.
    """

    def __init__(self, step: Callable[..., None]) -> None:
        self._step = step
        self._calls = 0
        self._stream = torch.cuda.Stream()
        self._graph = torch.cuda.CUDAGraph()
        self._arguments: tuple[Tensor, ...] = ()

    def __call__(self, *arguments: Tensor) -> None:
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
            self._arguments = tuple(argument.clone() for argument in arguments)
            with torch.cuda.graph(self._graph, stream=self._stream):
                self._step(*self._arguments)
        for static, argument in zip(self._arguments, arguments, strict=True):
            static.copy_(argument)
        self._graph.replay()
