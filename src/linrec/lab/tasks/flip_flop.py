"""Flip-flop: recall the bit that was written last, ignoring any number of other bits.

Source: Liu and others (2023, arXiv:2306.00946), flip-flop language modelling. Sequences have 512 tokens.
Training has instructions with probabilities 0.8 to ignore, 0.1 to write and 0.1 to read, FFL(0.8). The two
additional test sets are FFL(0.98), sparse, and FFL(0.1), dense. The authors train on 1.6 million sequences,
and test on 16,000, 160,000 and 4,000 sequences.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from linrec.lab.tasks.base import NO_TARGET, Split
from linrec.lab.tasks.synthetic import Drawn, SyntheticTask

__all__ = ["FlipFlop"]

WRITE, READ, IGNORE = 2, 3, 4


@dataclass(frozen=True, kw_only=True)
class FlipFlop(SyntheticTask):
    """Answer each read instruction with the bit of the latest write instruction.

        x = w 0  i 1  r 0  i 0  w 1  i 0  r 1
        y = . .  . .  0 .  . .  . .  . .  1 .

    Every instruction is followed by a bit. The first instruction writes, the last reads. All others ignore
    with probability p, and write or read with probability (1 - p) / 2 each. The bit after a read is the
    latest written bit, and it is the target at the read instruction. All other bits are random and not
    targets.

    Tokens are the bits 0 and 1, and the instructions 2 (write), 3 (read) and 4 (ignore). Scores are grouped
    by the number of instructions since the write. The probes "dense" and "sparse" have other probabilities
    than training.

    Args:
        length: number of tokens; even.
        ignore: probability p of an ignore instruction.
        ignore_dense: probability p in the probe "dense".
        ignore_sparse: probability p in the probe "sparse".
        fresh: whether every epoch draws new training samples; if not, all epochs share the same samples.

    Source: Liu and others (2023): FFL(0.8), FFL(0.1), FFL(0.98), 256 instructions.

    Example:
        >>> task = FlipFlop(length=10, ignore=0.4, n_train=1, n_validation=1, n_test=1)
        >>> task.split("test").inputs.tolist(), task.split("test").targets.tolist()
        ([[2, 0, 2, 1, 2, 1, 4, 0, 3, 1]], [[-100, -100, -100, -100, -100, -100, -100, -100, 1, -100]])
    """

    length: int = 512
    ignore: float = 0.8
    ignore_dense: float = 0.1
    ignore_sparse: float = 0.98
    fresh: bool = True
    group_name: ClassVar[str] = "distance"

    def __post_init__(self) -> None:
        if self.length < 4 or self.length % 2:
            raise ValueError(
                "`length` must be even and at least 4, because every instruction is followed by a bit; "
                f"got {self.length}."
            )
        for name in ("ignore", "ignore_dense", "ignore_sparse"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"`{name}` must be a probability, in 0 .. 1; got {getattr(self, name)}.")
        super().__post_init__()

    @property
    def vocab_size(self) -> int:
        """Vocabulary size: two bits, three instructions."""
        return 5

    @property
    def n_outputs(self) -> int:
        """Number of target classes: bits."""
        return 2

    @property
    def chance(self) -> float:
        """Expected accuracy of a uniform guess of a bit."""
        return 1 / 2

    @cached_property
    def probes(self) -> Mapping[str, Split]:
        """Additional test samples by name: "dense", "sparse", and the lengths of `test_lengths`."""
        others = {"dense": self.ignore_dense, "sparse": self.ignore_sparse}
        named = {
            name: dataclasses.replace(self, ignore=ignore, test_lengths=()).split("test")
            for name, ignore in others.items()
        }
        return {**named, **super().probes}

    def draw(self, random: np.random.Generator, n: int) -> Drawn:
        """Draw n sequences of length / 2 instructions and bits."""
        pairs = self.length // 2
        # a single random number decides between write, read and ignore
        number = random.random((n, pairs))
        writes = number < (1 - self.ignore) / 2
        reads = (number < 1 - self.ignore) & ~writes
        writes[:, 0], reads[:, 0] = True, False
        writes[:, -1], reads[:, -1] = False, True
        latest = np.maximum.accumulate(np.where(writes, np.arange(pairs), 0), axis=1)
        bits = random.integers(0, 2, (n, pairs))
        bits = np.where(reads, np.take_along_axis(bits, latest, axis=1), bits)

        inputs = np.empty((n, self.length), np.int64)
        inputs[:, ::2] = np.select([writes, reads], [WRITE, READ], IGNORE)
        inputs[:, 1::2] = bits
        targets = np.full((n, self.length), NO_TARGET, np.int64)
        targets[:, ::2] = np.where(reads, bits, NO_TARGET)
        return Drawn(inputs, targets, np.repeat(np.arange(pairs) - latest, 2, axis=1))
