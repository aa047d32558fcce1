"""Base class of sequence classification tasks with generated samples, which are cached in files."""

import abc
import dataclasses
import functools
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Int64, UInt8
from torch import Tensor

from linrec.errors import unknown
from linrec.lab.corpora.progress import ReadingDisplay
from linrec.lab.tasks.base import SPLIT_NAMES, Batch, SplitName, require_at_least
from linrec.lab.tasks.cache import kept
from linrec.lab.tasks.classification import ClassificationTask
from linrec.lab.tasks.drawing import draw_distinct, fingerprints, split_generator
from linrec.lab.tasks.images import SequentialSplit

# maximum number of samples per round: amortises the call overhead, and keeps the progress bar moving
ROUND = 1000
# smallest number of samples with a progress bar
SHOWN = 20_000


@dataclass(frozen=True, eq=False)
class LabelledTokens:
    """Labelled sequences of tokens, with a vocabulary of at most 256 tokens: a `Source`.

    Attributes:
        tokens: shape (n, t), uint8; the padding after a sequence may have any value.
        labels: class of each sequence, shape (n), int64.
        lengths: number of steps in each sequence, shape (n), int64; None if all sequences have t steps.

    Example:
        >>> tokens = torch.tensor([[3, 1, 0], [2, 2, 1]], dtype=torch.uint8)
        >>> split = LabelledTokens(tokens, torch.tensor([0, 1]), lengths=torch.tensor([2, 3]))
        >>> batch = split.rows(torch.tensor([1]))
        >>> batch.inputs.tolist(), batch.targets.tolist(), batch.lengths.tolist()
        ([[2, 2, 1]], [1], [3])
    """

    tokens: UInt8[Tensor, "n t"]
    labels: Int64[Tensor, "n"]
    lengths: Int64[Tensor, "n"] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, index: Int64[Tensor, "b"]) -> Batch:
        """Return sequences as a batch, on the device of the split.

        Args:
            index: indices of sequences, shape (b), int64, on any device.

        Returns:
            Inputs, shape (b, t), int64; targets, shape (b), int64; `reset` None; the lengths.
        """
        index = index.to(self.labels.device)
        lengths = None if self.lengths is None else self.lengths[index]
        return Batch(self.tokens[index].long(), self.labels[index], None, lengths)

    def of_epoch(self, *, seed: int, epoch: int) -> "LabelledTokens":
        """Return the split itself: its sequences are the same in every epoch."""
        return self

    def to(self, device: torch.device | str) -> "LabelledTokens":
        """Return the split with its sequences on a device, as bytes."""
        lengths = None if self.lengths is None else self.lengths.to(device)
        return LabelledTokens(self.tokens.to(device), self.labels.to(device), lengths)


@dataclass(frozen=True, kw_only=True)
class LabelledTask(ClassificationTask):
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
    version: ClassVar[int] = 1
    """Version of the generator, increased when the same fields give different samples."""
    not_drawn_from: ClassVar[tuple[str, ...]] = ("cache",)
    """Fields that the cached samples do not depend on."""

    def __post_init__(self) -> None:
        # a configuration that is loaded from JSON has a string
        object.__setattr__(self, "cache", None if self.cache is None else Path(self.cache))
        require_at_least(self, n_train=1, n_validation=1, n_test=1, seed=0)

    @abc.abstractmethod
    def draw(self, random: np.random.Generator, n: int) -> LabelledTokens:
        """Draw at most n samples, a pure function of the fields and the random generator."""

    def prepared(self) -> "LabelledTask":
        """Generate the training samples or load them from the cache, and return the task itself."""
        self.labelled("train")
        return self

    def split(self, name: SplitName) -> LabelledTokens | SequentialSplit:
        """Return the samples of a split.

        Args:
            name: "train", "validation" or "test".

        Raises:
            ValueError: the split does not exist, or there are too few distinct samples.
        """
        return self.labelled(name)

    def labelled(self, name: SplitName) -> LabelledTokens:
        """Return the samples of a split as they are cached; see `split` for arguments and errors."""
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
