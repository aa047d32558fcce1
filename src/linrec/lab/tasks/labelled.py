"""Base classes of sequence classification: scores, labelled tokens and series, and cached drawn samples."""

import abc
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int64, Num
from numpy.typing import NDArray
from torch import Tensor

from linrec.errors import unknown
from linrec.lab.corpora.corpus import ReadingDisplay
from linrec.lab.tasks.base import (
    SPLIT_NAMES,
    Batch,
    ObjectiveName,
    Source,
    SplitName,
    StoredSource,
    scores_by_class,
    times_of,
)
from linrec.lab.tasks.drawing import draw_distinct, fingerprints, split_generator
from linrec.lab.tasks.fields import CheckedTask
from linrec.lab.tasks.files import kept

if TYPE_CHECKING:
    from linrec.lab.tasks.images import SequentialSplit

# maximum number of samples per round: amortises the call overhead, and keeps the progress bar moving
ROUND = 1000
# smallest number of samples with a progress bar
SHOWN = 20_000


class LabelledSource(Source, Protocol):
    """A split with a class per sequence."""

    @property
    def labels(self) -> Int64[Tensor, "n"]:
        """Class of each sequence."""
        ...


class ClassificationTask(abc.ABC):
    """Base class of tasks with a class per sequence."""

    per_sequence: ClassVar[bool] = True
    objective: ClassVar[ObjectiveName] = "classification"

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int | None:
        """Vocabulary size; None for real-valued inputs."""

    @property
    def n_features(self) -> int | None:
        """Number of input features per step; None for tokens."""
        return None

    @property
    @abc.abstractmethod
    def n_outputs(self) -> int:
        """Number of target classes."""

    @abc.abstractmethod
    def split(self, name: SplitName) -> LabelledSource:
        """Return the sequences of a split: "train", "validation" or "test"."""

    @property
    def chance(self) -> float:
        """Expected accuracy of a uniform guess."""
        return 1 / self.n_outputs

    @cached_property
    def trivial_score(self) -> float:
        """Test accuracy of always predicting the most frequent class of the training split."""
        majority = torch.bincount(self.split("train").labels).argmax()
        return float((self.split("test").labels == majority).double().mean())

    @property
    def reset_token(self) -> None:
        """Always None: these tasks have no reset token."""
        return None

    def score(self, predictions: Int64[Tensor, "n"], split: LabelledSource) -> dict[str, Any]:
        """Return the accuracy of predictions on a split.

        Args:
            predictions: predicted classes, shape (n), any integer dtype, on any device.
            split: the split of the labels.

        Returns:
            JSON values: "accuracy", the fraction of correct predictions, and "accuracy_by_class", the
            accuracy within each class, None for classes without samples.
        """
        return scores_by_class(predictions, split.labels, self.n_outputs)


@dataclass(frozen=True, eq=False)
class LabelledTokens(StoredSource):
    """Labelled sequences of tokens: a `Source`.

    Attributes:
        tokens: shape (n, t), uint8 or, for more than 256 tokens, int32; the padding after a
            sequence may have any value.
        labels: class of each sequence, shape (n), int64.
        lengths: number of steps in each sequence, shape (n), int64; None if all sequences have t steps.

    Example:
        >>> tokens = torch.tensor([[3, 1, 0], [2, 2, 1]], dtype=torch.uint8)
        >>> split = LabelledTokens(tokens, torch.tensor([0, 1]), lengths=torch.tensor([2, 3]))
        >>> batch = split.rows(torch.tensor([1]))
        >>> batch.inputs.tolist(), batch.targets.tolist(), batch.lengths.tolist()
        ([[2, 2, 1]], [1], [3])
    """

    tokens: Int[Tensor, "n t"]
    labels: Int64[Tensor, "n"]
    lengths: Int64[Tensor, "n"] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, index: Int64[Tensor, "b"]) -> Batch:
        """Return sequences as a batch: inputs (b, t), int64; targets (b), int64; and the lengths."""
        index = index.to(self.labels.device)
        lengths = None if self.lengths is None else self.lengths[index]
        return Batch(self.tokens[index].long(), self.labels[index], None, lengths)


@dataclass(frozen=True, eq=False)
class LabelledSeries(StoredSource):
    """Labelled time series x of real numbers, normalised on access: a `Source`.

        inputs = (x - mean) / std, or 0 after the end of a series and where x is NaN

    Attributes:
        values: x, shape (n, t, f), int16 or float32; the padding after a series may have any value.
        labels: class of each series, shape (n), int64; or numbers, shape (n, m), float32.
        mean: mean to subtract, shape (t, f) or (1, f), float32.
        std: standard deviation to divide by, in the shape of `mean`, float32.
        lengths: number of steps in each series, shape (n), int64; None if all series have t steps.
        unit: unit of time, if batches have `dt` from the last feature; see `times_of`. None for no `dt`.

    Example:
        >>> values = torch.tensor([[[3], [5], [0]], [[4], [4], [2]]], dtype=torch.int16)
        >>> mean, std, lengths = torch.full((1, 1), 4.0), torch.full((1, 1), 2.0), torch.tensor([2, 3])
        >>> split = LabelledSeries(values, torch.tensor([0, 1]), mean, std, lengths)
        >>> split.rows(torch.tensor([0])).inputs[0, :, 0], split.rows(torch.tensor([0])).lengths
        (tensor([-0.5000,  0.5000,  0.0000]), tensor([2]))
    """

    values: Num[Tensor, "n t f"]
    labels: Int64[Tensor, "n"] | Float[Tensor, "n m"]
    mean: Float[Tensor, "t f"]
    std: Float[Tensor, "t f"]
    lengths: Int64[Tensor, "n"] | None = None
    unit: float | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, index: Int64[Tensor, "b"]) -> Batch:
        """Return series as a batch: inputs (b, t, f), float32; targets, the labels; and the lengths."""
        index = index.to(self.labels.device)
        inputs = ((self.values[index].float() - self.mean) / self.std).nan_to_num(0.0)
        if self.lengths is None:
            return Batch(inputs, self.labels[index], None, dt=times_of(inputs, self.unit))
        lengths = self.lengths[index]
        after = torch.arange(inputs.shape[1], device=inputs.device) >= lengths[:, None]
        inputs = inputs.masked_fill(after[:, :, None], 0)
        return Batch(inputs, self.labels[index], None, lengths, times_of(inputs, self.unit))

    def every(self, k: int) -> "LabelledSeries":
        """Return the series subsampled to every k-th step, from the first; all series must have t steps."""
        assert self.lengths is None and len(self.mean) == self.values.shape[1]
        values, mean, std = self.values[:, ::k], self.mean[::k], self.std[::k]
        return dataclasses.replace(self, values=values, mean=mean, std=std)


def stratified(
    labels: Int64[np.ndarray, "n"], shares: Sequence[float], random: np.random.Generator
) -> list[NDArray[np.int64]]:
    """Split samples at random into parts with equal class proportions, up to rounding.

    Args:
        labels: class of each sample, shape (n).
        shares: fraction of the samples in each part; the sum must be 1.
        random: the random generator.

    Returns:
        The indices of the samples in each part, in random order.
    """
    parts: list[list[NDArray[np.int64]]] = [[np.empty(0, np.int64)] for _ in shares]
    for label in np.unique(labels):
        of_class = random.permutation(np.flatnonzero(labels == label))
        cuts = np.rint(np.cumsum(shares)[:-1] * len(of_class)).astype(np.int64)
        for part, piece in zip(parts, np.split(of_class, cuts), strict=True):
            part.append(piece)
    return [random.permutation(np.concatenate(part)) for part in parts]


@dataclass(frozen=True, kw_only=True)
class LabelledTask(CheckedTask, ClassificationTask):
    """Base class of tasks with generated token sequences and a class per sequence; a subclass defines `draw`.

    All samples of all splits are distinct. They are generated once, and cached in a file per split.

    Args:
        n_train: number of training samples.
        n_validation: number of validation samples.
        n_test: number of test samples.
        seed: seed of the data only.
        cache: folder for generated samples; None is `linrec/tasks` in the user's cache folder.

    Raises:
        ValueError: a field is out of range, or there are too few distinct samples.
    """

    n_train: int
    n_validation: int
    n_test: int
    seed: int = 0
    cache: Path | None = None
    section: ClassVar[str] = "task"
    least: ClassVar[Mapping[str, int]] = {"n_train": 1, "n_validation": 1, "n_test": 1, "seed": 0}
    version: ClassVar[int] = 1
    """Version of the generator, increased when the same fields give different samples."""
    not_drawn_from: ClassVar[tuple[str, ...]] = ("cache",)
    """Fields that the cached samples do not depend on."""

    @abc.abstractmethod
    def draw(self, random: np.random.Generator, n: int) -> LabelledTokens:
        """Draw at most n samples, a pure function of the fields and the random generator."""

    def prepared(self) -> "LabelledTask":
        """Generate the training samples or load them from the cache, and return the task itself."""
        self.labelled("train")
        return self

    def split(self, name: SplitName) -> "LabelledTokens | SequentialSplit":
        """Return the samples of a split: "train", "validation" or "test".

        Raises:
            ValueError: the split does not exist, or there are too few distinct samples.
        """
        return self.labelled(name)

    def labelled(self, name: SplitName) -> LabelledTokens:
        """Return the samples of a split as they are cached; errors as in `split`."""
        if name not in SPLIT_NAMES:
            raise unknown("split", name, SPLIT_NAMES)
        if name not in self._found:
            # in this order, no split depends on the size of a later split
            others: tuple[SplitName, ...] = ("test", "validation", "train")
            before = [self.labelled(other) for other in others[: others.index(name)]]
            task = type(self).__name__
            fields = {n: v for n, v in dataclasses.asdict(self).items() if n not in self.not_drawn_from}
            about = {"task": task, "version": self.version, "split": name, "fields": fields}
            drawn = kept(task.lower(), about, lambda: self._drawn(name, before), cache=self.cache)
            self._found[name] = LabelledTokens(**drawn)
        return self._found[name]

    @cached_property
    def _found(self) -> dict[SplitName, LabelledTokens]:
        return {}

    def _drawn(self, name: SplitName, before: list[LabelledTokens]) -> dict[str, Tensor]:
        """Draw the samples of a split, without repetitions and without samples of the splits in `before`."""
        n = {"train": self.n_train, "validation": self.n_validation, "test": self.n_test}[name]
        random = split_generator(type(self).__name__, name, self.seed)
        rounds = draw_distinct(
            functools.partial(self.draw, random),
            n,
            rows=lambda drawn: drawn.tokens.numpy(),
            name=f"the split {name!r} of {type(self).__name__}",
            taken={number for split in before for number in fingerprints(split.tokens.numpy()).tolist()},
            largest_round=ROUND,
        )
        found: list[LabelledTokens] = []
        what = f"drawing {type(self).__name__} {name}"
        with ReadingDisplay().reading(what, n) if n >= SHOWN else nullcontext(_ignored) as advance:
            for drawn, new in rounds:
                found.append(_chosen(drawn, torch.from_numpy(new)))
                advance(len(found[-1]))
        parts = {"tokens": torch.cat([split.tokens for split in found])}
        parts["labels"] = torch.cat([split.labels for split in found])
        lengths = [split.lengths for split in found if split.lengths is not None]
        return parts | ({"lengths": torch.cat(lengths)} if lengths else {})


def _chosen(split: LabelledTokens, chosen: Bool[Tensor, "n"]) -> LabelledTokens:
    lengths = None if split.lengths is None else split.lengths[chosen]
    return LabelledTokens(split.tokens[chosen], split.labels[chosen], lengths)


def _ignored(advance: int) -> None:
    """Do nothing; used in place of a progress bar's `advance`."""
