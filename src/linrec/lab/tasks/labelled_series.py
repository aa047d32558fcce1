"""Labelled time series, and stratified splitting."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64, Num
from numpy.typing import NDArray
from torch import Tensor

from linrec.lab.tasks.base import Batch, times_of


@dataclass(frozen=True, eq=False)
class LabelledSeries:
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
        """Return series as a batch, on the device of the split.

        Args:
            index: indices of series, shape (b), int64, on any device.

        Returns:
            Inputs, shape (b, t, f), float32; targets, the labels; `reset` None; the lengths.
        """
        index = index.to(self.labels.device)
        inputs = ((self.values[index].float() - self.mean) / self.std).nan_to_num(0.0)
        if self.lengths is None:
            return Batch(inputs, self.labels[index], None, dt=times_of(inputs, self.unit))
        lengths = self.lengths[index]
        after = torch.arange(inputs.shape[1], device=inputs.device) >= lengths[:, None]
        inputs = inputs.masked_fill(after[:, :, None], 0)
        return Batch(inputs, self.labels[index], None, lengths, times_of(inputs, self.unit))

    def of_epoch(self, *, seed: int, epoch: int) -> "LabelledSeries":
        """Return the split itself: its series are the same in every epoch."""
        return self

    def to(self, device: torch.device | str) -> "LabelledSeries":
        """Return the split with its series on a device, without converting their dtype."""
        lengths = None if self.lengths is None else self.lengths.to(device)
        values, labels, mean, std = (t.to(device) for t in (self.values, self.labels, self.mean, self.std))
        return LabelledSeries(values, labels, mean, std, lengths, self.unit)

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
