"""What every task offers: splits of token sequences, batches of them, and scores that need no model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, get_args, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from linrec.literals import SplitName
from linrec.rules import at_least

SPLIT_NAMES: tuple[SplitName, ...] = get_args(SplitName)
NO_TARGET = -100
ObjectiveName = Literal["classification", "regression"]
PIECE = 256
"""Sequences whose targets are looked at together."""


class Batch(NamedTuple):
    """Some sequences of a split, as a model and its loss take them.

    Args:
        inputs: input tokens, shape (b, t), int64; or real features, shape (b, t, f), of a task that has
            `n_features`. Of a `PairedTask` two sequences, (b, 2, t) or (b, 2, t, f).
        targets: target class at every position, shape (b, t), int64; or of every sequence, shape (b), of a
            task `per_sequence`; -100 where nothing is to be predicted. Of a regression, real numbers,
            (b, t, f) or (b, f); NaN where nothing is to be predicted.
        reset: true where a document begins, so that nothing passes from before it, shape (b, t), bool; None
            where sequences hold one document each.
        lengths: steps of each sequence, shape (b), or (b, 2) of pairs, int64, where the task is
            `per_sequence`; what follows them is padding. None where all have t.
    """

    inputs: Int64[Tensor, "b *pair t"] | Float[Tensor, "b *pair t f"]
    targets: Int64[Tensor, "b *t"] | Float[Tensor, "b *t f"]
    reset: Bool[Tensor, "b t"] | None
    lengths: Int64[Tensor, "b *pair"] | None = None


def has_target(targets: Int64[Tensor, "b *t"] | Float[Tensor, "b *t f"]) -> Bool[Tensor, "b *n"]:
    """Tell where something is to be predicted: a class, or a real number.

    Args:
        targets: those of a batch or a split.

    Returns:
        Of the shape of the targets.

    Example:
        >>> has_target(torch.tensor([3, NO_TARGET])), has_target(torch.tensor([[0.5], [torch.nan]]))
        (tensor([ True, False]), tensor([[ True],
                [False]]))
    """
    return ~targets.isnan() if targets.is_floating_point() else targets != NO_TARGET


@runtime_checkable
class Source(Protocol):
    """What training and evaluation need of a split: sequences of one length, by number."""

    def __len__(self) -> int:
        """Number of sequences."""
        ...

    def rows(self, index: Int64[Tensor, "n"]) -> Batch:
        """Return the sequences of these numbers as a batch, on the device that the split is on."""
        ...

    def of_epoch(self, *, seed: int, epoch: int) -> "Source":
        """Return the same data as a training epoch cuts it, a pure function of seed and epoch."""
        ...

    def to(self, device: torch.device | str) -> "Source":
        """Return the split with its data on a device, or the split itself where it is too large for that."""
        ...


@dataclass(frozen=True, eq=False)
class Split:
    """The samples of one split, whole and in memory: a `Source`.

    Attributes:
        inputs: input tokens, shape (n, t), int64; or features, (n, t, f).
        targets: target class at every position, shape (n, t), int64; -100 where nothing is to be predicted.
            Or what else a `Batch` has.
        group: what a score distinguishes at every position, shape (n, t), int64, such as how many of the
            latest inputs the target depends on; None where a task has nothing of the kind.
        redrawn: gives the split of an epoch, from the keywords `seed` and `epoch`, where every epoch has
            samples of its own.

    Example:
        >>> from linrec.tasks import MemoryHorizon
        >>> task = MemoryHorizon(length=6, n_resets=1, n_samples=10, n_validation=2, n_test=1)
        >>> batch = task.split("train").rows(torch.tensor([3, 0]))
        >>> batch.inputs.shape, batch.targets.shape, batch.reset
        (torch.Size([2, 6]), torch.Size([2, 6]), None)
    """

    inputs: Int64[Tensor, "n t"] | Float[Tensor, "n t f"]
    targets: Int64[Tensor, "n *t"] | Float[Tensor, "n *t f"]
    group: Int64[Tensor, "n t"] | None = None
    redrawn: Callable[..., "Split"] | None = None

    def __len__(self) -> int:
        return self.inputs.shape[0]

    def rows(self, index: Int64[Tensor, "n"]) -> Batch:
        """Return the samples of these numbers, on the device that the split is on.

        Args:
            index: numbers of samples, shape (n), int64, on any device.
        """
        index = index.to(self.inputs.device)
        return Batch(self.inputs[index], self.targets[index], None)

    def of_epoch(self, *, seed: int, epoch: int) -> "Split":
        """Return the samples of an epoch: the split itself, or what is drawn for it, on the same device."""
        if self.redrawn is None:
            return self
        return self.redrawn(seed=seed, epoch=epoch).to(self.inputs.device)

    def to(self, device: torch.device | str) -> "Split":
        """Return the split with its tensors on a device."""
        group = None if self.group is None else self.group.to(device)
        return Split(self.inputs.to(device), self.targets.to(device), group, self.redrawn)


@runtime_checkable
class Task(Protocol):
    """The interface that training and reports rely on; a task is a frozen dataclass that has it.

    The dataclass is the task's configuration. Its data is a pure function of that configuration, its seed
    and the files that it names included, and of the split's name: the global random state is neither read nor
    changed. A task that can say more about predictions than their loss and accuracy is a `ScoredTask` too.

    The loss is the cross-entropy of a classification in nats, or the mean squared error of a regression,
    which has `n_features`, and no accuracy.
    """

    section: ClassVar[str]
    """Name of the section of the command line that the task's fields are in, such as "task" or "data"."""

    per_sequence: ClassVar[bool]
    """Whether a sequence has one target, as its class; else every step has its own."""

    objective: ClassVar[ObjectiveName]
    """Whether targets are classes or real numbers."""

    @property
    def n_features(self) -> int | None:
        """Real numbers per step, where inputs are sequences of them; None where steps are tokens."""
        ...

    @property
    def vocab_size(self) -> int | None:
        """Number of input tokens; None where only the data can tell, until the task is `prepared`."""
        ...

    @property
    def n_outputs(self) -> int | None:
        """Number of target classes, or of real numbers in a target; None like `vocab_size`."""
        ...

    @property
    def chance(self) -> float:
        """Expected accuracy of a uniform guess; of a regression, loss of a constant."""
        ...

    @property
    def trivial_score(self) -> float:
        """Test accuracy of the best predictor that never looks at its input; of a regression, its loss."""
        ...

    @property
    def reset_token(self) -> int | None:
        """The input token that makes all inputs before it irrelevant; None where the task has none."""
        ...

    def prepared(self) -> "Task":
        """Return the task with everything that only the data can tell."""
        ...

    def split(self, name: SplitName) -> Source:
        """Return the sequences of one split; the splits share none."""
        ...


@runtime_checkable
class PairedTask(Protocol):
    """A task `per_sequence` whose sequences come in pairs, of which each has one target."""

    pairs: ClassVar[bool]
    """True."""


@runtime_checkable
class ProbedTask(Protocol):
    """A task with test samples besides the test split, such as longer ones."""

    @property
    def probes(self) -> Mapping[str, Source]:
        """The samples by name; none of them serves for choosing anything."""
        ...


@runtime_checkable
class ScoredTask(Protocol):
    """A task whose splits are whole in memory, and that scores predictions in a way of its own."""

    def split(self, name: SplitName) -> Source:
        """Return the samples of one split; the splits share none."""
        ...

    def score(self, predictions: Any, split: Any) -> Mapping[str, Any]:
        """Compare predictions with the targets of a split.

        Returns:
            JSON: of classes with "accuracy", of real numbers with "nrmse", the root of the mean squared error
            as a share of the targets' standard deviation.
        """
        ...


def judged_by(task: Task) -> Literal["accuracy", "perplexity", "mse"]:
    """Return what models of a task are judged by.

    Returns:
        "mse", the loss of a regression; "accuracy" of a task that scores predicted classes; "perplexity",
        exp(loss), where the likelihood is all that is known.

    Example:
        >>> from linrec.tasks import LanguageModeling, MemoryHorizon
        >>> judged_by(MemoryHorizon()), judged_by(LanguageModeling())
        ('accuracy', 'perplexity')
    """
    if task.objective == "regression":
        return "mse"
    return "accuracy" if isinstance(task, ScoredTask) else "perplexity"


def compared(predictions: Int64[Tensor, "n *t"], targets: Int64[Tensor, "n *t"]) -> tuple[Tensor, Tensor]:
    """Return where predictions are right, and where there is a target, both of the targets' shape, bool.

    Raises:
        ValueError: `predictions` has another shape than the targets.
        TypeError: `predictions` are not integers.
    """
    if predictions.is_floating_point() or predictions.is_complex():
        raise TypeError(
            f"`predictions` must be integer classes; got {predictions.dtype}. Pass logits.argmax(-1)."
        )
    if predictions.shape != targets.shape:
        raise ValueError(
            f"`predictions` must have the shape of the targets, {tuple(targets.shape)}; "
            f"got {tuple(predictions.shape)}."
        )
    targets = targets.cpu()
    return predictions.cpu() == targets, targets != NO_TARGET


def scores_by_class(predictions: Int64[Tensor, "n"], labels: Int64[Tensor, "n"], n: int) -> dict[str, Any]:
    """Return "accuracy" and "accuracy_by_class" of one prediction a sample, None for classes without samples.

    Args:
        predictions: predicted classes, any integer dtype, on any device.
        labels: the right ones.
        n: number of classes.

    Raises:
        ValueError: `predictions` has another shape than the labels.
        TypeError: `predictions` are not integers.

    Example:
        >>> scores_by_class(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]), 3)["accuracy_by_class"]
        [0.5, 1.0, None]
    """
    right, _ = compared(predictions, labels)
    of_class = [right[labels.cpu() == number].double() for number in range(n)]
    return {
        "accuracy": float(right.double().mean()),
        "accuracy_by_class": [float(r.mean()) if len(r) else None for r in of_class],
    }


def errors_of_numbers(predictions: Float[Tensor, "n *t f"], source: Source) -> dict[str, float | None]:
    """Return "mse", "mae" and "nrmse" of predicted real numbers; positions without target do not count.

        nrmse = sqrt(sum (prediction - target)^2 / sum (target - mean target)^2)

    Args:
        predictions: real numbers of the shape of the targets of all sequences, on any device.
        source: what was predicted; its targets need not be in memory all at once.

    Returns:
        The mean squared and the mean absolute error, and the root of the former as a share of the targets'
        standard deviation: 1 is that of the best constant, None where all targets are equal.

    Raises:
        ValueError: `predictions` has another shape than the targets.
        TypeError: `predictions` are no real numbers.

    Example:
        >>> split = Split(torch.zeros(2, 1, 1), torch.tensor([[1.0], [3.0]]))
        >>> errors_of_numbers(torch.tensor([[1.0], [1.0]]), split)
        {'mse': 2.0, 'mae': 1.0, 'nrmse': 1.4142135623730951}
    """
    if not predictions.is_floating_point():
        raise TypeError(
            f"`predictions` must be real numbers; got {predictions.dtype}. Pass the model's outputs."
        )
    pieces = torch.arange(len(source)).split(PIECE)
    shape = (len(source), *source.rows(pieces[0][:1]).targets.shape[1:])
    if predictions.shape != shape:
        raise ValueError(
            f"`predictions` must have the shape of the targets, {shape}; got {tuple(predictions.shape)}."
        )

    def targets(piece: Tensor) -> tuple[Tensor, Tensor]:
        found = source.rows(piece).targets.cpu().double()
        return found, has_target(found)

    total = count = torch.zeros(shape[-1], dtype=torch.float64)
    for found, asked in map(targets, pieces):
        total = total + found.nan_to_num(0.0).flatten(0, -2).sum(0)
        count = count + asked.flatten(0, -2).sum(0)
    mean = total / count
    squares, absolute, around = torch.zeros(3, dtype=torch.float64)
    for piece in pieces:
        found, asked = targets(piece)
        error = (predictions[piece].cpu().double() - found)[asked]
        squares, absolute = squares + error.square().sum(), absolute + error.abs().sum()
        around = around + (found - mean).square()[asked].sum()
    n = float(count.sum())
    nrmse = float((squares / around).sqrt()) if around > 0 else None
    return {"mse": float(squares) / n, "mae": float(absolute) / n, "nrmse": nrmse}


def require_at_least(task: object, **least: int) -> None:
    """Refuse fields of a task that are below their least value.

    Raises:
        ValueError: one is.
    """
    for name, bound in least.items():
        at_least(bound, **{name: getattr(task, name)})
