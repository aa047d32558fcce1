"""The interface of tasks: splits of sequences, batches, and scores of predictions."""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar, get_args, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from linrec.literals import SplitName
from linrec.text import Tokenizer

SPLIT_NAMES: tuple[SplitName, ...] = get_args(SplitName)
NO_TARGET = -100
ObjectiveName = Literal["classification", "regression"]
PIECE = 256
"""Number of sequences that are processed at once when scoring."""


class Batch(NamedTuple):
    """A batch of sequences, with everything that a model and its loss need.

    Args:
        inputs: input tokens, shape (b, t), int64; or real-valued features, shape (b, t, f), if the task has
            `n_features`. A `PairedTask` has two sequences per sample, (b, 2, t) or (b, 2, t, f).
        targets: target class at every position, shape (b, t), int64, or for a `per_sequence` task of every
            sequence, shape (b); -100 without a target. For a regression, real numbers, (b, t, f) or (b, f);
            NaN without a target.
        reset: true at the first token of a document, which cuts the state before it, shape (b, t), bool; None
            if every sequence is a single document.
        lengths: number of steps before the padding of each sequence, shape (b), or (b, 2) for pairs, int64,
            if the task is `per_sequence`; None if all sequences have t steps.
        dt: time since the step before, shape (b, t), positive, for mixers that take irregular steps; None if
            the task does not give times.
        source: source sequences of a `SourcedTask`, shape (b, s), int64; None for other tasks.
        source_lengths: number of steps before the padding of each source, shape (b), int64.
    """

    inputs: Int64[Tensor, "b *pair t"] | Float[Tensor, "b *pair t f"]
    targets: Int64[Tensor, "b *t"] | Float[Tensor, "b *t f"]
    reset: Bool[Tensor, "b t"] | None = None
    lengths: Int64[Tensor, "b *pair"] | None = None
    dt: Float[Tensor, "b t"] | None = None
    source: Int64[Tensor, "b s"] | None = None
    source_lengths: Int64[Tensor, "b"] | None = None


def has_target(targets: Int64[Tensor, "b *t"] | Float[Tensor, "b *t f"]) -> Bool[Tensor, "b *n"]:
    """Return a mask of the positions that have a target, a class or a real number.

    Args:
        targets: targets of a batch or a split.

    Returns:
        Mask of the shape of the targets, bool.

    Example:
        >>> has_target(torch.tensor([3, NO_TARGET])), has_target(torch.tensor([[0.5], [torch.nan]]))
        (tensor([ True, False]), tensor([[ True],
                [False]]))
    """
    return ~targets.isnan() if targets.is_floating_point() else targets != NO_TARGET


def times_of(inputs: Float[Tensor, "b t f"], unit: float | None) -> Float[Tensor, "b t"] | None:
    """Return `dt` of a batch: the last feature in units of a regular step, and 1 at the first step.

    Args:
        inputs: features, the last of which is the time since the step before.
        unit: length of a regular step; None for no `dt`.
    """
    if unit is None:
        return None
    return torch.cat([torch.ones_like(inputs[:, :1, -1]), inputs[:, 1:, -1] / unit], 1)


@runtime_checkable
class Source(Protocol):
    """The interface of a split for training and evaluation: indexed sequences of equal length."""

    def __len__(self) -> int:
        """Return the number of sequences."""
        ...

    def rows(self, index: Int64[Tensor, "n"]) -> Batch:
        """Return the sequences with these indices as a batch, on the device of the split."""
        ...

    def of_epoch(self, *, seed: int, epoch: int) -> "Source":
        """Return the split for a training epoch, a pure function of seed and epoch."""
        ...

    def to(self, device: torch.device | str) -> "Source":
        """Return the split with its data on a device, or the split itself if it is too large."""
        ...


@runtime_checkable
class OrderedSource(Protocol):
    """A split with its own order in training, such as batches of similar lengths."""

    def order(self, *, batch_size: int, seed: int, epoch: int) -> Int64[Tensor, "n"]:
        """Return the order in which an epoch visits the sequences, a pure function of its arguments."""
        ...


S = TypeVar("S", bound="StoredSource")


@dataclass(frozen=True, eq=False)
class StoredSource(abc.ABC):
    """Base class of splits whose tensors are completely in memory: a `Source`; a subclass defines `rows`."""

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def rows(self, index: Int64[Tensor, "n"]) -> Batch:
        """Return the samples with these indices as a batch, on the device of the split."""

    def of_epoch(self: S, *, seed: int, epoch: int) -> S:
        """Return the samples of an epoch: by default the split itself, the same in every epoch."""
        return self

    def to(self: S, device: torch.device | str) -> S:
        """Return the split with its tensors on a device, without converting their dtype."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        moved = {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
        return dataclasses.replace(self, **moved)


@dataclass(frozen=True, eq=False)
class Split(StoredSource):
    """The samples of a split, completely in memory: a `Source`.

    Attributes:
        inputs: input tokens, shape (n, t), int64; or features, (n, t, f).
        targets: targets in any form of `Batch.targets`, such as a class at every position, shape (n, t),
            int64, -100 without a target.
        group: group of every position for scores by group, shape (n, t), int64, such as the number of inputs
            that the target depends on; None for a task without groups.
        unit: unit of time, if batches have `dt` from the last feature; see `times_of`. None for no `dt`.
        redrawn: function that returns the split of an epoch, from the keywords `seed` and `epoch`; None if
            all epochs share the same samples.

    Example:
        >>> from linrec.lab.tasks import MemoryHorizon
        >>> task = MemoryHorizon(length=6, n_resets=1, n_samples=10, n_validation=2, n_test=1)
        >>> batch = task.split("train").rows(torch.tensor([3, 0]))
        >>> batch.inputs.shape, batch.targets.shape, batch.reset
        (torch.Size([2, 6]), torch.Size([2, 6]), None)
    """

    inputs: Int64[Tensor, "n t"] | Float[Tensor, "n t f"]
    targets: Int64[Tensor, "n *t"] | Float[Tensor, "n *t f"]
    group: Int64[Tensor, "n t"] | None = None
    unit: float | None = None
    redrawn: Callable[..., "Split"] | None = None

    def __len__(self) -> int:
        return self.inputs.shape[0]

    def rows(self, index: Int64[Tensor, "n"]) -> Batch:
        """Return the samples with these indices as a batch, on the device of the split."""
        index = index.to(self.inputs.device)
        inputs = self.inputs[index]
        return Batch(inputs, self.targets[index], None, dt=times_of(inputs, self.unit))

    def of_epoch(self, *, seed: int, epoch: int) -> "Split":
        """Return the samples of an epoch, on the same device: the split itself, or newly drawn samples."""
        if self.redrawn is None:
            return self
        return self.redrawn(seed=seed, epoch=epoch).to(self.inputs.device)


@runtime_checkable
class Task(Protocol):
    """The interface of tasks for training and reports, implemented by frozen dataclasses.

    The dataclass is the task's configuration. The data are a pure function of the configuration, which
    includes the seed and the files, and of the split's name. The global random state is neither read nor
    changed. A task with more scores than loss and accuracy is also a `ScoredTask`.

    The loss of a classification is the cross-entropy in nats; a `WeightedTask` weighs its classes. The loss
    of a regression is the mean squared error; a regression has `n_features` and no accuracy.
    """

    section: ClassVar[str]
    """Name of the task's section in command line options, such as "task" or "data"."""

    per_sequence: ClassVar[bool]
    """Whether a sequence has a single target, such as its class; otherwise every step has a target."""

    objective: ClassVar[ObjectiveName]
    """Whether targets are classes or real numbers."""

    @property
    def n_features(self) -> int | None:
        """Number of input features per step for real-valued inputs; None for tokens."""
        ...

    @property
    def vocab_size(self) -> int | None:
        """Vocabulary size; None for real-valued inputs, or before `prepared` if it depends on the data."""
        ...

    @property
    def n_outputs(self) -> int | None:
        """Number of target classes, or of real numbers per target; None before `prepared` if unknown."""
        ...

    @property
    def chance(self) -> float:
        """Expected accuracy of a uniform guess; for a regression, the loss of a constant."""
        ...

    @property
    def trivial_score(self) -> float:
        """Test accuracy, or loss for a regression, of the best predictor that ignores its input."""
        ...

    @property
    def reset_token(self) -> int | None:
        """The input token that makes all inputs before it irrelevant; None for most tasks."""
        ...

    def prepared(self) -> "Task":
        """Return the task with all fields set that depend on its data."""
        ...

    def split(self, name: SplitName) -> Source:
        """Return the sequences of a split; splits have no sequences in common."""
        ...


@runtime_checkable
class PairedTask(Protocol):
    """A `per_sequence` task whose samples are pairs of sequences, with a target per pair."""

    pairs: ClassVar[bool]
    """Always True."""


@runtime_checkable
class SourcedTask(Protocol):
    """A task whose samples have a source sequence, for an encoder-decoder."""

    @property
    def source_vocab_size(self) -> int | None:
        """Vocabulary size of the sources; None before `prepared` if it depends on the data."""
        ...


@runtime_checkable
class GeneratedTask(Protocol):
    """A task with scores of generated outputs, beside the loss of each token."""

    def generated_scores(self, model: Any, split: Any) -> Mapping[str, Any]:
        """Return scores of a model in evaluation mode, as JSON values."""
        ...


@runtime_checkable
class TokenizedTask(Protocol):
    """A task of texts with a tokenizer, which a run folder keeps."""

    def tokenizer_object(self) -> Tokenizer:
        """Return the tokenizer that made the tokens."""
        ...


@runtime_checkable
class WeightedTask(Protocol):
    """A `ScoredTask` of unequal classes: the loss weighs them, and "auc" compares models.

        loss = -w_y log softmax(outputs)_y, a mean over targets

    Its `score` takes the logarithms of all classes' probabilities, (n, n_outputs), in place of classes.
    """

    class_weights: ClassVar[tuple[float, ...]]
    """The weight w of each class."""


@runtime_checkable
class ImagesTask(Protocol):
    """A `per_sequence` task of whole images, (b, channels, height, width), for an `ImageClassifier`."""

    whole_images: ClassVar[bool]
    """Always True."""


@runtime_checkable
class ProbedTask(Protocol):
    """A task with additional test samples, such as longer sequences than in training."""

    @property
    def probes(self) -> Mapping[str, Source]:
        """The additional test samples by name; they are never used for model selection."""
        ...


@runtime_checkable
class ResizableTask(Protocol):
    """A task whose sequences may have another length, for a curriculum."""

    def at_length(self, length: int) -> Task:
        """Return the task with sequences of another length, and with the same tokens and outputs."""
        ...


@runtime_checkable
class ScoredTask(Protocol):
    """A task whose splits are completely in memory, with its own scores of predictions."""

    def split(self, name: SplitName) -> Source:
        """Return the samples of a split; splits have no samples in common."""
        ...

    def score(self, predictions: Any, split: Any) -> Mapping[str, Any]:
        """Return scores of predictions on a split.

        Args:
            predictions: classes or real numbers in the shape of the targets, on any device.
            split: the split of the targets.

        Returns:
            JSON values: "accuracy" for classes; "nrmse" for real numbers, the root mean squared error divided
            by the targets' standard deviation; and further scores.

        Raises:
            ValueError: `predictions` has another shape than the targets.
            TypeError: `predictions` are logits in place of classes, or classes in place of real numbers.
        """
        ...


def judged_by(task: Task) -> Literal["accuracy", "auc", "perplexity", "mse"]:
    """Return the name of the metric that compares models on a task.

    Returns:
        "mse" for a regression; "auc" for a `WeightedTask`; "accuracy" for another classification with
        `score`; otherwise "perplexity", exp(loss).

    Example:
        >>> from linrec.lab.tasks import LanguageModeling, MemoryHorizon
        >>> judged_by(MemoryHorizon()), judged_by(LanguageModeling())
        ('accuracy', 'perplexity')
    """
    if task.objective == "regression":
        return "mse"
    if isinstance(task, WeightedTask):
        return "auc"
    return "accuracy" if isinstance(task, ScoredTask) else "perplexity"


def compared(predictions: Int64[Tensor, "n *t"], targets: Int64[Tensor, "n *t"]) -> tuple[Tensor, Tensor]:
    """Return masks of correct predictions and of positions with a target, bool (targets' shape)."""
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
    """Return "accuracy" and "accuracy_by_class" of a prediction per sample; None for classes without samples.

    Args:
        predictions: predicted classes, any integer dtype, on any device.
        labels: true classes.
        n: number of classes.
    """
    right, _ = compared(predictions, labels)
    of_class = [right[labels.cpu() == number].double() for number in range(n)]
    return {
        "accuracy": float(right.double().mean()),
        "accuracy_by_class": [float(r.mean()) if len(r) else None for r in of_class],
    }


def errors_of_numbers(predictions: Float[Tensor, "n *t f"], source: Source) -> dict[str, float | None]:
    """Return "mse", "mae" and "nrmse" of real-valued predictions, ignoring positions without a target.

        nrmse = sqrt(sum (prediction - target)^2 / sum (target - mean target)^2)

    Args:
        predictions: real numbers in the shape of the targets of all sequences, on any device.
        source: the split of the targets, which are read in batches.

    Returns:
        The mean squared error, the mean absolute error, and the root mean squared error divided by the
        targets' standard deviation: 1 for the best constant, None if all targets are equal.
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
