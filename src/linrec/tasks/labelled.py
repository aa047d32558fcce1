"""Sequences of tokens that have one label each, as a split holds them: a byte for each token."""

from dataclasses import dataclass

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from linrec.tasks.base import Batch


@dataclass(frozen=True, eq=False)
class LabelledTokens:
    """Sequences of up to 256 different tokens with a class each: a `Source`.

    Attributes:
        tokens: shape (n, t), uint8; what follows a sequence is padding, of any value.
        labels: class of each sequence, shape (n), int64.
        lengths: steps of each sequence, shape (n), int64; None where all have t.

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
        """Return sequences as a batch, on the device that the split is on.

        Args:
            index: numbers of sequences, shape (b), int64, on any device.

        Returns:
            Inputs, shape (b, t), int64; targets, shape (b), int64; no `reset`; the lengths.
        """
        index = index.to(self.labels.device)
        lengths = None if self.lengths is None else self.lengths[index]
        return Batch(self.tokens[index].long(), self.labels[index], None, lengths)

    def of_epoch(self, *, seed: int, epoch: int) -> "LabelledTokens":
        """Return the split itself: its sequences are the same in every epoch."""
        return self

    def to(self, device: torch.device | str) -> "LabelledTokens":
        """Return the split with its sequences on a device."""
        lengths = None if self.lengths is None else self.lengths.to(device)
        return LabelledTokens(self.tokens.to(device), self.labels.to(device), lengths)
