"""One training step, its replay as a CUDA graph, and evaluation."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64, Num
from torch import Tensor, nn
from torch.nn import functional as F

from linrec.lab.tasks import NO_TARGET, Batch, ScoredTask, Source, Task, has_target
from linrec.lab.train.data import on_device, stream_order
from linrec.lab.train.fabric import ALONE, Fabric, Grid, any_process, gathered, make_grid, summed
from linrec.lab.train.optim import gradient_norm
from linrec.models import Block, ImageClassifier, LanguageModel, SequenceClassifier
from linrec.nn.added_loss import weighing_losses
from linrec.nn.cross_entropy import linear_cross_entropy
from linrec.trees import Tree, leaves, map_tree, replaced


class Outcome(NamedTuple):
    """The output of an `Objective`.

    Attributes:
        loss: cross-entropy in nats, or squared error for a regression, summed over all targets: a scalar.
        correct: number of correctly predicted targets, 0 for a regression: a scalar.
        predictions: the likeliest class at every position, (b, t), int64, or of every sequence, (b); with
            class weights, logarithms of the classes' probabilities, (b, classes); for a regression, real
            numbers in the shape of the targets.
        state: the state after the last step, without gradients, if it was asked for; otherwise None.
    """

    loss: Float[Tensor, ""]
    correct: Int64[Tensor, ""]
    predictions: Int64[Tensor, "b *t"] | Float[Tensor, "b *t f"]
    state: Tree = None


class Objective(nn.Module):
    """A model and its loss as a single module, which is distributed as a whole.

    The loss is a sum over targets. The caller divides it by the number of targets in the whole batch, so that
    micro-batches and several processes give the same gradient as the batch at once. For real-valued targets,
    the loss is the squared error, and each number counts as a target.

    Args:
        model: the model. A language model never holds all logits in memory at once. A classifier has a
            target per sequence or, without pooling, per step.
        label_smoothing: as in `OptimConfig`; ignored in evaluation mode.
        class_weights: as in `WeightedTask`, for a classifier; empty for equal weights.
    """

    class_weights: Tensor | None

    def __init__(
        self,
        model: LanguageModel | SequenceClassifier | ImageClassifier,
        *,
        label_smoothing: float = 0.0,
        class_weights: Sequence[float] = (),
    ) -> None:
        super().__init__()
        self.model, self.label_smoothing = model, label_smoothing
        weights = torch.tensor(class_weights) if class_weights else None
        self.register_buffer("class_weights", weights, persistent=False)
        self.scored: Callable[[Tensor, Tensor], Outcome] = self._scored

    def forward(
        self, *parts: Num[Tensor, "b *shape"] | None, state: Tree = None, keep_state: bool = False
    ) -> Outcome:
        """Return loss and predictions for the fields of a `Batch`; targets of -100 or NaN are ignored.

        A language model begins with `state`, or with its initial state if that is None, and returns the state
        after the last step with `keep_state`.
        """
        inputs, targets, reset, lengths, dt, source, source_lengths = Batch(*parts)  # type: ignore[arg-type]
        if isinstance(self.model, ImageClassifier):
            return self.scored(self.model(inputs), targets)
        if isinstance(self.model, SequenceClassifier):
            return self.scored(self.model(inputs, lengths=lengths, dt=dt), targets)
        sources = {} if source is None else {"source": source, "source_lengths": source_lengths}
        x, last = self.model.hidden(inputs, state, reset=reset, dt=dt, keep_state=keep_state, **sources)
        outcome = self.scored(x, targets)
        return replaced(outcome, state=map_tree(Tensor.detach, last)) if keep_state else outcome

    def compile(self, **options: Any) -> None:
        """Compile each block of the model and the loss; the options are those of `torch.compile`.

        Blocks of equal structure share a compilation, so the first step of a deep model takes no longer than
        the first step of a shallow one. Run the steps within `linrec.models.compilation.compiling`.
        """
        for block in self.model.modules():
            if isinstance(block, Block):
                block.compile(**options)
        self.scored = torch.compile(self._scored, **options)

    def _scored(self, x: Tensor, targets: Tensor) -> Outcome:
        """Return the outcome, given the inputs of a language model's head or the outputs of a classifier."""
        smoothing = self.label_smoothing if self.training else 0.0
        if isinstance(self.model, LanguageModel):
            head = self.model.head
            loss, predictions = linear_cross_entropy(
                x, head.weight, head.bias, targets, cap=head.cap, label_smoothing=smoothing
            )
            return Outcome(loss, (predictions == targets).sum(), predictions)
        outputs = x.float()
        if targets.is_floating_point():
            # replace NaN before subtracting, because the gradient would be NaN in spite of the mask
            error = (outputs - targets.nan_to_num(0.0)) * has_target(targets)
            return Outcome(error.square().sum(), targets.new_zeros((), dtype=torch.int64), outputs)
        loss = F.cross_entropy(
            outputs.flatten(0, -2),
            targets.flatten(),
            self.class_weights,
            ignore_index=NO_TARGET,
            reduction="sum",
            label_smoothing=smoothing,
        )
        predictions = outputs.argmax(-1)
        correct = (predictions == targets).sum()
        return Outcome(loss, correct, predictions if self.class_weights is None else outputs.log_softmax(-1))


class Carried:
    """The state after a batch, with which the sequences of the next batch begin.

    The tensors stay where they are while the state has one form, also over `clear`. So a step that is
    captured as a CUDA graph can read and write them.
    """

    def __init__(self) -> None:
        self._held: Tree = None
        self._is_empty = True

    @property
    def state(self) -> Tree:
        """The state after the last batch; None at the start of an epoch."""
        return None if self._is_empty else self._held

    def clear(self) -> None:
        """Let the next batch begin with the model's initial state."""
        self._is_empty = True

    def keep(self, state: Tree) -> None:
        """Keep a copy of a state without gradients, in place of the state before."""
        if _form(state) != _form(self._held):
            # contiguous: parts may be views of each other or expanded, and could not be written in place
            self._held = map_tree(lambda part: part.clone(memory_format=torch.contiguous_format), state)
        else:
            held = leaves(self._held)
            places = {part.untyped_storage().data_ptr() for part in held}
            # copies of the parts that would change while the parts are written
            parts = [
                part.clone() if part.untyped_storage().data_ptr() in places else part
                for part in leaves(state)
            ]
            for mine, part in zip(held, parts, strict=True):
                mine.copy_(part)
        self._is_empty = False


def _form(state: Tree) -> Tree:
    return map_tree(lambda part: (part.shape, part.dtype), state)


def train_step(
    *batch: Num[Tensor, "b *shape"] | None,
    fabric: Fabric,
    objective: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    window: Float[Tensor, "4"],
    accumulate: int = 1,
    clip_norm: float | None = None,
    carried: Carried | None = None,
    grid: Grid = ALONE,
) -> None:
    """Run a training step: forward, loss, backward, clipping, optimisers; does not synchronise the device.

    Several processes take a step together, each with its share of the batch. Fabric has set up `objective`,
    an `Objective`, and `optimizers`.

    Args:
        batch: the fields of a `Batch`, this process's share of the sequences.
        window: running sums; this step's (loss, accuracy, gradient norm, 1) of the whole batch is added. The
            accuracy of a regression is 0.
        accumulate: number of micro-batches of this process's share; the gradient is of the whole batch.
        clip_norm: maximum norm of the gradient; None disables clipping.
        carried: the state of a language model before the batch, in whose place the state after the batch is
            kept; needs `accumulate` = 1. None begins with the model's initial state and keeps no state.
        grid: the processes that share the sequences of `batch`.
    """
    whole = grid.part(Batch(*batch))  # type: ignore[arg-type]
    n_targets = summed(fabric, has_target(whole.targets).sum()).clamp(min=1)
    # DDP and FSDP average gradients over the processes, so each process divides by n_targets / world_size
    n_targets_each = n_targets / fabric.world_size
    loss, correct = window.new_zeros(()), window.new_zeros(())
    for optimizer in optimizers:
        optimizer.zero_grad()
    parts = [(None,) * accumulate if tensor is None else tensor.chunk(accumulate) for tensor in whole]
    for place, piece in enumerate(zip(*parts, strict=True), start=1):
        # the processes exchange gradients only after the last micro-batch
        waits = fabric.no_backward_sync(objective, enabled=place < accumulate)  # type: ignore[arg-type]
        with waits, weighing_losses(1 / accumulate), grid.split():
            state = None if carried is None else carried.state
            outcome = objective(*piece, state=state, keep_state=carried is not None)
            fabric.backward(outcome.loss / n_targets_each)
        if carried is not None:
            # in place, so not before the backward pass has read the state before
            carried.keep(outcome.state)
        loss, correct = loss + outcome.loss.detach(), correct + outcome.correct
    # of the optimisers, because a walk through the modules takes longer than a small model's kernels
    parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
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
    carry_state: bool = False,
    grid: Grid | None = None,
) -> dict[str, Any]:
    """Return the scores of the model on a split; several processes share each batch.

    Args:
        objective: an `Objective` that Fabric has set up; it is in training mode afterwards.
        batch_size: sequences per batch, summed over all processes.
        batches: number of batches from the start of the split, or of each stream; None takes all.
        carry_state: whether each sequence of a language model begins with the final state of the sequence in
            its row of the batch before. The split is cut into `batch_size` streams of equal length. Rows that
            are beyond the end of a `TokenSplit` have no targets.
        grid: the processes that share sequences; None if each has sequences of its own.

    Returns:
        "loss" in nats, the mean over all targets, and "accuracy"; for a regression only "loss", the mean
        squared error. For a whole split, also the result of the task's `score`, if it has this method. Empty
        for an empty split.
    """
    if not len(split):
        return {}
    device, grid = fabric.device, grid or make_grid(fabric, 1)
    # sums of loss, correct predictions and targets, kept on the device to avoid syncs
    sums = torch.zeros(3, device=device, dtype=torch.float64 if device.type != "mps" else torch.float32)
    scored = task if isinstance(task, ScoredTask) and batches is None else None
    predictions = []
    order, state = torch.arange(len(split)), None
    if carry_state:
        order = stream_order(-(-len(split) // batch_size) * batch_size, batch_size)
    objective.eval()
    for index in order.split(batch_size)[:batches]:
        mine = split.rows(index[grid.row :: grid.rows])
        batch = grid.part(on_device(_filled(mine, batch_size // grid.rows), device))
        with grid.split():
            outcome = objective(*batch, state=state, keep_state=carry_state)
        state = outcome.state
        sums += torch.stack([outcome.loss, outcome.correct, has_target(batch.targets).sum()])
        if scored is not None:
            # row r has the sequences r, r + rows, ..., so the predictions are interleaved
            pieces = gathered(fabric, outcome.predictions)
            if grid.columns > 1:
                n = grid.columns
                pieces = [torch.cat(pieces[first : first + n], 1) for first in range(0, len(pieces), n)]
            dealt = torch.stack(pieces, dim=1).flatten(0, 1)
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
    # fill up with sequences without targets, so that compiled code sees a single shape
    missing = batch_size - len(batch.inputs)

    def filled(tensor: Tensor, value: float = 0) -> Tensor:
        # F.pad lists the axes from the last to the first
        return F.pad(tensor, (*(0, 0) * (tensor.ndim - 1), 0, missing), value=value)

    inputs, targets, reset, lengths, dt, source, source_lengths = batch
    return Batch(
        filled(inputs),
        filled(targets, math.nan if targets.is_floating_point() else NO_TARGET),
        None if reset is None else filled(reset),
        # length 1, because a sequence has at least one step
        None if lengths is None else filled(lengths, 1),
        None if dt is None else filled(dt, 1),
        None if source is None else filled(source),
        None if source_lengths is None else filled(source_lengths, 1),
    )


def reads_values(model: LanguageModel | SequenceClassifier | ImageClassifier, batch: Batch) -> bool:
    """Return whether a training step may read values of the batch to choose its kernels.

    Such a step waits for the device, and a CUDA graph of it would repeat one batch's choice for all batches.
    A memory across the stack may read `reset`: recurrent memory runs a row for each reset within a segment.
    """
    memory = model.memory if isinstance(model, LanguageModel) else None
    return memory is not None and batch.reset is not None


def skipped_parameters(objective: nn.Module, batch: Batch) -> set[nn.Parameter]:
    """Return the parameters without a gradient after a step: the loss of the batch does not depend on them.

    A memory between segments, for example, is not read in a window that is no longer than a segment. The
    random state of the devices does not change.
    """
    with torch.random.fork_rng():
        nodes: list[Any] = [objective(*batch).loss.grad_fn]
    seen, parameters = set(nodes), {*objective.parameters()}
    while nodes:
        node = nodes.pop()
        if node.name() == "torch::autograd::AccumulateGrad":
            parameters.discard(node.variable)
        new = {following for following, _ in node.next_functions} - seen - {None}
        seen |= new
        nodes += new
    return {parameter for parameter in parameters if parameter.requires_grad}


def may_skip(fabric: Fabric, objective: Objective, batches: Iterable[Batch]) -> bool:
    """Return whether a step of any process may leave parameters without a gradient; moves the objective.

    Tries a sequence of every batch; the batches have every shape of the run, and are on its device.
    """
    objective.to(fabric.device)
    found = False
    with fabric.autocast():
        for batch in batches:
            row = Batch(*(None if part is None else part[:1] for part in batch))  # type: ignore[arg-type]
            # values of a later batch may choose other parameters
            found = found or reads_values(objective.model, row) or bool(skipped_parameters(objective, row))
    return any_process(fabric, found)
