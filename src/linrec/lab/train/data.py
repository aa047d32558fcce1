"""Batches of a split, in an order that depends only on (seed, epoch), or in the order of the text."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from linrec.errors import ConfigError
from linrec.lab.tasks import Batch, OrderedSource, Source


def epoch_order(n_samples: int, *, seed: int, epoch: int) -> Int64[Tensor, "n"]:
    """Return the order in which an epoch visits the samples, a pure function of seed and epoch."""
    return torch.from_numpy(np.random.default_rng([seed, epoch]).permutation(n_samples))


def stream_order(n_samples: int, batch_size: int) -> Int64[Tensor, "n"]:
    """Return the order in which each sequence of a batch follows the sequence in its row of the batch before.

    row r of batch i is sample r W + i     with W = floor(n_samples / batch_size) batches
    """
    n_batches = n_samples // batch_size
    return torch.arange(batch_size * n_batches).view(batch_size, n_batches).T.flatten()


def on_device(batch: Batch, device: torch.device) -> Batch:
    """Return a batch on a device; copies from the CPU to CUDA are asynchronous."""

    def moved(tensor: Tensor) -> Tensor:
        if device.type == "cuda" and tensor.device.type == "cpu":
            return tensor.pin_memory().to(device, non_blocking=True)
        return tensor.to(device)

    inputs, targets, *optional = batch
    return Batch(moved(inputs), moved(targets), *(None if t is None else moved(t) for t in optional))


class Batches:
    """The batches of each epoch, all with `batch_size` sequences; an incomplete last batch is dropped.

    Their order is that of an `OrderedSource`, or random.

    Compiled code and CUDA graphs need equal shapes. The dropped samples differ between epochs, because the
    order does.

    Args:
        source: the sequences; moved to `device` once if they are small enough.
        batch_size: sequences per batch.
        seed: the run's seed.
        device: device of the batches.
        rank: rank of this process among the processes that share each batch.
        processes: number of processes; each gets `batch_size / processes` sequences.
        streams: whether batches continue each other row by row, in the order of `stream_order`; otherwise
            they have the order of `epoch_order`.
    """

    def __init__(
        self,
        source: Source,
        *,
        batch_size: int,
        seed: int,
        device: torch.device,
        rank: int = 0,
        processes: int = 1,
        streams: bool = False,
    ) -> None:
        self._size = len(source.of_epoch(seed=seed, epoch=0))
        if self._size < batch_size:
            raise ConfigError(
                f"`loop.batch_size` must be at most the number of training samples, {self._size}; got "
                f"{batch_size}. Pass a smaller batch or more samples."
            )
        if batch_size % processes:
            raise ConfigError(
                f"`loop.batch_size` must be a multiple of the {processes} processes; got {batch_size}."
            )
        self._source = source.to(device)
        self._device = device
        self.batch_size = batch_size
        self.seed = seed
        self._streams = streams
        self._mine = slice(rank, None, processes)

    def __len__(self) -> int:
        return self._size // self.batch_size

    def epoch(self, epoch: int, *, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch, starting with batch `start`."""
        source = self._source.of_epoch(seed=self.seed, epoch=epoch)
        if self._streams:
            order = stream_order(self._size, self.batch_size)
            # the samples left out are at the start or at the end of the text, or at both
            spare = np.random.default_rng([self.seed, epoch, 2]).integers(self._size % self.batch_size + 1)
            order += int(spare)
        elif isinstance(source, OrderedSource):
            order = source.order(batch_size=self.batch_size, seed=self.seed, epoch=epoch)
        else:
            order = epoch_order(self._size, seed=self.seed, epoch=epoch)
        for batch in range(start, len(self)):
            rows = order[batch * self.batch_size : (batch + 1) * self.batch_size]
            yield on_device(source.rows(rows[self._mine]), self._device)

    def after(self, step: int) -> Iterator[Batch]:
        """Yield the batches that follow `step` batches, epoch after epoch without end."""
        epoch, start = divmod(step, len(self))
        yield from self.epoch(epoch, start=start)
        for later in itertools.count(epoch + 1):
            yield from self.epoch(later)


def staged(stages: Sequence[tuple[int, Batches]], step: int) -> Iterator[Batch]:
    """Yield the batches that follow step `step` of a run, without end.

    A stage is a pair (its first step, its batches); the first begins at step 0, and the last has no end.
    """
    ends = [first for first, _ in stages[1:]]
    for (first, batches), end in itertools.zip_longest(stages, ends):
        if end is None:
            yield from batches.after(step - first)
        elif step < end:
            yield from itertools.islice(batches.after(step - first), end - step)
            step = end


def begins_epoch(stages: Sequence[tuple[int, Batches]], step: int) -> bool:
    """Return whether the batch that follows step `step` is the first of an epoch; see `staged`."""
    first, batches = [stage for stage in stages if stage[0] <= step][-1]
    return (step - first) % len(batches) == 0
