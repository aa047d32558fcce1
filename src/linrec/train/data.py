"""Batches of a split that lies on the device whole, in an order that depends on (seed, epoch) alone."""

from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from linrec.tasks import Split
from linrec.train.errors import ConfigError


def epoch_order(n_samples: int, *, seed: int, epoch: int) -> Int64[Tensor, "n"]:
    """Return the order in which an epoch visits the samples, a pure function of seed and epoch.

    Args:
        n_samples: number of samples.
        seed: the run's seed.
        epoch: which epoch, from 0.

    Returns:
        A permutation of 0 .. n_samples - 1, int64.

    Example:
        >>> order = epoch_order(5, seed=0, epoch=1)
        >>> sorted(order.tolist()), bool((order == epoch_order(5, seed=0, epoch=1)).all())
        ([0, 1, 2, 3, 4], True)
    """
    return torch.from_numpy(np.random.default_rng([seed, epoch]).permutation(n_samples))


class Batches:
    """The batches of each epoch; all have `batch_size` sequences, the rest of an epoch is dropped.

    Which samples are dropped changes from epoch to epoch with the order. Equal shapes are what compiled code
    and captured graphs need.

    Args:
        split: the samples, moved to `device` once.
        batch_size: sequences per batch.
        seed: the run's seed.
        device: where the batches are needed.

    Raises:
        ConfigError: the split has fewer than `batch_size` samples.

    Example:
        >>> from linrec.tasks import MemoryHorizon
        >>> split = MemoryHorizon(length=6, n_resets=1, n_samples=10, n_validation=2, n_test=1).split("train")
        >>> batches = Batches(split, batch_size=3, seed=0, device=torch.device("cpu"))
        >>> len(batches), [inputs.shape[0] for inputs, _ in batches.epoch(0)]
        (2, [3, 3])
    """

    def __init__(self, split: Split, *, batch_size: int, seed: int, device: torch.device) -> None:
        if len(split) < batch_size:
            raise ConfigError(
                f"`loop.batch_size` must be at most the training samples = {len(split)}; got {batch_size}. "
                "Pass a smaller batch or more samples."
            )
        self.inputs = split.inputs.to(device)
        self.targets = split.targets.to(device)
        self.batch_size = batch_size
        self.seed = seed

    def __len__(self) -> int:
        return len(self.inputs) // self.batch_size

    def epoch(
        self, epoch: int, *, start: int = 0
    ) -> Iterator[tuple[Int64[Tensor, "b t"], Int64[Tensor, "b t"]]]:
        """Yield inputs and targets of the batches of one epoch, from batch `start` on."""
        order = epoch_order(len(self.inputs), seed=self.seed, epoch=epoch).to(self.inputs.device)
        for batch in range(start, len(self)):
            rows = order[batch * self.batch_size : (batch + 1) * self.batch_size]
            yield self.inputs[rows], self.targets[rows]
