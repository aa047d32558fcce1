"""Event XOR: tell the parity of a bit string that is given as the times at which the bit changes.

Source: Lechner and Hasani (2020, arXiv:2006.04418), and the released code of Hasani and others (2022,
arXiv:2106.13898), CfC: strings of 2 to 31 bits, 100,000 for training and 10,000 for testing.
"""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from jaxtyping import Int64
from torch import Tensor

from linrec.lab.tasks.automata import Parity
from linrec.lab.tasks.base import SplitName, require_at_least
from linrec.lab.tasks.classification import ClassificationTask
from linrec.lab.tasks.labelled_series import LabelledSeries

__all__ = ["EventXor"]

UNIT = 32
"""Number of bits in a unit of time, as in the released code."""


@dataclass(frozen=True, kw_only=True)
class EventXor(ClassificationTask):
    """Tell whether the number of ones is odd in a bit string that is given as events.

        x_i = (b_{t_i}, (t_i - t_{i-1}) / 32),   t_0 = 0,   y = b_1 + ... + b_L   (mod 2)

    The events t_1 < t_2 < ... are the first bit, every change, and the last bit. The second feature is the
    time since the event before. Sequences are padded to `length` steps, and batches contain the lengths.

    The strings are drawn by `Parity`: splits share no string, and the shortest strings are only for training.
    There are too few of them to hold some out.

    Args:
        length: greatest number of bits L; L is uniform on 2 .. `length`.
        dense: whether every bit is an event.
        with_dt: whether batches have `dt`, for mixers that take irregular steps: the number of bits since the
            event before, and 1 at the first event. It is a feature too.
        n_train: number of training samples.
        n_validation: number of validation samples.
        n_test: number of test samples.
        seed: seed of the data only.

    Raises:
        ValueError: a field is out of range, or there are too few strings for disjoint splits.

    Source: the released code of Hasani and others (2022). There, `dt` is 32 times smaller, test strings may
    also be training strings, and so may the shortest strings be test strings.

    Example:
        >>> task = EventXor(length=7, n_train=1, n_validation=1, n_test=1)
        >>> batch = task.split("test").rows(torch.tensor([0]))
        >>> (32 * batch.inputs[0, :, 1]).int().tolist(), batch.lengths.tolist()
        ([1, 4, 0, 0, 0, 0, 0], [2])
    """

    length: int = 31
    dense: bool = False
    with_dt: bool = False
    n_train: int = 100_000
    n_validation: int = 1_000
    n_test: int = 10_000
    seed: int = 0
    section: ClassVar[str] = "task"
    vocab_size: ClassVar[int | None] = None
    n_features: ClassVar[int | None] = 2
    n_outputs: ClassVar[int] = 2

    def __post_init__(self) -> None:
        require_at_least(self, length=2)
        # the task of the strings checks the other fields
        self.strings()

    def prepared(self) -> "EventXor":
        """Return the task itself, which does not depend on files."""
        return self

    def split(self, name: SplitName) -> LabelledSeries:
        """Return the samples of a split.

        Args:
            name: "train", "validation" or "test".

        Raises:
            ValueError: the split does not exist.
        """
        if name not in self._drawn:
            strings = self.strings().split(name)
            split = events(strings.inputs, strings.targets.amax(1), dense=self.dense)
            self._drawn[name] = dataclasses.replace(split, unit=1 / UNIT if self.with_dt else None)
        return self._drawn[name]

    def strings(self) -> Parity:
        """Return the task that draws the strings of bits and their parities."""
        sizes: dict[str, Any] = {
            "n_train": self.n_train,
            "n_validation": self.n_validation,
            "n_test": self.n_test,
        }
        return Parity(length=self.length, min_length=2, fresh=False, seed=self.seed, **sizes)

    @cached_property
    def _drawn(self) -> dict[SplitName, LabelledSeries]:
        return {}


def events(bits: Int64[Tensor, "n t"], labels: Int64[Tensor, "n"], *, dense: bool) -> LabelledSeries:
    """Return strings of bits as events.

    Args:
        bits: strings, each followed by padding with another number than 0 and 1.
        labels: class of each string.
        dense: whether every bit is an event; if not, the first bit, every change and the last bit are.

    Example:
        >>> split = events(torch.tensor([[1, 1, 0, 2]]), torch.tensor([0]), dense=False)
        >>> split.rows(torch.tensor([0])).inputs.tolist(), split.lengths
        ([[[1.0, 0.03125], [0.0, 0.0625], [0.0, 0.0], [0.0, 0.0]]], tensor([2]))
    """
    inside = bits <= 1
    kept = inside.clone()
    if not dense:
        kept[:, 1:] &= bits[:, 1:] != bits[:, :-1]
        kept[torch.arange(len(bits)), inside.sum(1) - 1] = True
    # the places of the events come first, in their order
    place = (~kept).int().argsort(dim=1, stable=True)
    elapsed = torch.diff(place + 1, dim=1, prepend=torch.zeros(len(bits), 1, dtype=torch.int64))
    values = torch.stack([bits.gather(1, place), elapsed / UNIT], dim=-1).float()
    return LabelledSeries(values, labels, torch.zeros(1, 2), torch.ones(1, 2), kept.sum(1))
