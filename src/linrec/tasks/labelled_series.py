"""Series of real numbers with a class each: normalised as they are read, and cut by class."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64, Num
from numpy.typing import NDArray
from torch import Tensor

from linrec.tasks.base import Batch


@dataclass(frozen=True, eq=False)
class LabelledSeries:
    """Series x of real numbers with a class each, normalised as they are read: a `Source`.

        inputs = (x - mean) / std      before the end of a series, and 0 after it, or where x is NaN

    Attributes:
        values: x, shape (n, t, f), int16 or float32; what follows a series is padding, of any value.
        labels: class of each series, shape (n), int64.
        mean: what is taken for the mean, shape (t, f) or (1, f), float32.
        std: what is taken for the standard deviation, of the same shape.
        lengths: steps of each series, shape (n), int64; None where all have t.

    Example:
        >>> values = torch.tensor([[[3], [5], [0]], [[4], [4], [2]]], dtype=torch.int16)
        >>> mean, std, lengths = torch.full((1, 1), 4.0), torch.full((1, 1), 2.0), torch.tensor([2, 3])
        >>> split = LabelledSeries(values, torch.tensor([0, 1]), mean, std, lengths)
        >>> split.rows(torch.tensor([0])).inputs[0, :, 0], split.rows(torch.tensor([0])).lengths
        (tensor([-0.5000,  0.5000,  0.0000]), tensor([2]))
    """

    values: Num[Tensor, "n t f"]
    labels: Int64[Tensor, "n"]
    mean: Float[Tensor, "t f"]
    std: Float[Tensor, "t f"]
    lengths: Int64[Tensor, "n"] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, index: Int64[Tensor, "b"]) -> Batch:
        """Return series as a batch, on the device that the split is on.

        Args:
            index: numbers of series, shape (b), int64, on any device.

        Returns:
            Inputs, shape (b, t, f), float32; targets, shape (b), int64; no `reset`; the lengths.
        """
        index = index.to(self.labels.device)
        inputs = ((self.values[index].float() - self.mean) / self.std).nan_to_num(0.0)
        if self.lengths is None:
            return Batch(inputs, self.labels[index], None)
        lengths = self.lengths[index]
        after = torch.arange(inputs.shape[1], device=inputs.device) >= lengths[:, None]
        return Batch(inputs.masked_fill(after[:, :, None], 0), self.labels[index], None, lengths)

    def of_epoch(self, *, seed: int, epoch: int) -> "LabelledSeries":
        """Return the split itself: its series are the same in every epoch."""
        return self

    def to(self, device: torch.device | str) -> "LabelledSeries":
        """Return the split with its series on a device, in the type that they are kept in."""
        lengths = None if self.lengths is None else self.lengths.to(device)
        values, labels, mean, std = (t.to(device) for t in (self.values, self.labels, self.mean, self.std))
        return LabelledSeries(values, labels, mean, std, lengths)

    def every(self, k: int) -> "LabelledSeries":
        """Return the same series with every k-th step alone, from the first; they must be of equal length."""
        assert self.lengths is None and len(self.mean) == self.values.shape[1]
        values, mean, std = self.values[:, ::k], self.mean[::k], self.std[::k]
        return dataclasses.replace(self, values=values, mean=mean, std=std)


def stratified(
    labels: Int64[np.ndarray, "n"], shares: Sequence[float], random: np.random.Generator
) -> list[NDArray[np.int64]]:
    """Cut samples at random into parts that have the same share of every class, up to rounding.

    Args:
        labels: class of each sample, shape (n).
        shares: share of each part; together 1.
        random: decides which samples are in which part, and their order.

    Returns:
        The numbers of the samples of each part.

    Example:
        >>> parts = stratified(np.array([0] * 4 + [1] * 8), (0.5, 0.25, 0.25), np.random.default_rng(0))
        >>> [np.bincount(part >= 4).tolist() for part in parts]
        [[2, 4], [1, 2], [1, 2]]
    """
    parts: list[list[NDArray[np.int64]]] = [[np.empty(0, np.int64)] for _ in shares]
    for label in np.unique(labels):
        of_class = random.permutation(np.flatnonzero(labels == label))
        cuts = np.rint(np.cumsum(shares)[:-1] * len(of_class)).astype(np.int64)
        for part, piece in zip(parts, np.split(of_class, cuts), strict=True):
            part.append(piece)
    return [random.permutation(np.concatenate(part)) for part in parts]
