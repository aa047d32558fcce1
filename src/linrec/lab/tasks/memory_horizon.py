"""Memory Horizon, the synthetic task of GateLoop (Katsch 2023, arXiv:2311.01927), section 5.1 and appendix A.

A sequence has numbers and a few reset tokens. The target at each position is a function of all numbers since
the latest reset, so a model must remember all of these numbers in order, and forget the numbers before.

The paper gives the range of numbers, the length, the resets per sample, the modulus and the number of samples
(table 2). This implementation makes the following choices where the paper gives no details:

- the 2,000 samples are the total: 200 for testing, 100 for validation, 1,700 for training;
- numbers are uniform on 0 .. `max_number`;
- resets are at `n_resets` distinct positions, uniform over the whole sequence, including the first position;
- the list of position n has all numbers after the latest reset, up to and including n;
- at a reset, the list is empty: the target is 0 and counts in scores, and the span is 0.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Int64
from numpy.typing import NDArray
from torch import Tensor

from linrec.lab.tasks.base import SPLIT_NAMES, ObjectiveName, Split, SplitName, compared
from linrec.lab.tasks.drawing import draw_distinct
from linrec.lab.tasks.fields import CheckedTask

__all__ = ["MemoryHorizon", "compress", "compress_suffixes"]

SPAN_EDGES = (0, 10, 25, 50, 100, 200)


def compress(numbers: Sequence[int], modulus: int) -> int:
    """Compress a list of numbers to a number: the alternating sum of products of opposite ends.

        x_1 x_n - x_2 x_{n-1} + x_3 x_{n-2} - ...   (mod modulus)

    If the length is odd, the last term of the sum is the middle number itself. The result is never negative.

    Args:
        numbers: the list, oldest first.
        modulus: number of possible results, at least 1.

    Returns:
        An integer in [0, modulus); 0 for the empty list.
    """
    if modulus < 1:
        raise ValueError(f"`modulus` must be at least 1; got {modulus}. The paper's value is 50.")
    half = len(numbers) // 2
    terms = [first * last for first, last in zip(numbers[:half], reversed(numbers), strict=False)]
    terms += numbers[half : len(numbers) - half]
    return (sum(terms[0::2]) - sum(terms[1::2])) % modulus


def compress_suffixes(numbers: NDArray[np.int64], span: NDArray[np.int64], modulus: int) -> NDArray[np.int64]:
    """Apply `compress` to the last `span[b, n]` numbers up to position n, for every sample b and position n.

        f(m, n) = x_m x_n - f(m + 1, n - 1)

    Removing both ends of a list flips the sign of all remaining terms. Thus the results for lists of a length
    follow from the results for lists that are shorter by two, with a vector operation per length over all
    samples and positions.

    Args:
        numbers: shape (b, t), int64.
        span: length of the list that ends at each position, shape (b, t), int64, at most n + 1 at position n.
        modulus: number of possible results.

    Returns:
        The results, shape (b, t), int64; 0 for an empty list.
    """
    batch, length = numbers.shape
    # time first, so that every operation below runs over contiguous memory; no sum exceeds
    # max^2 * (length + 1) / 2, which fits into 32 bits in all but extreme configurations
    bound = int(numbers.max(initial=0)) ** 2 * (length + 1) // 2
    x = np.ascontiguousarray(numbers.T, dtype=np.int32 if bound < 2**31 else np.int64)
    result = np.zeros(length * batch, dtype=np.int64)
    by_span = np.argsort(span.T, axis=None, kind="stable")
    ends = np.cumsum(np.bincount(span.ravel(), minlength=1))

    two_shorter, one_shorter = np.zeros((length + 2, batch), x.dtype), np.zeros((length + 1, batch), x.dtype)
    for size in range(1, len(ends)):
        n_lists = length - size + 1
        # a list of a single number is its own middle, which is not squared
        current = x.copy() if size == 1 else x[:n_lists] * x[size - 1 :] - two_shorter[1 : n_lists + 1]
        here = by_span[ends[size - 1] : ends[size]]
        result[here] = current.ravel()[here - (size - 1) * batch] % np.int64(modulus)
        two_shorter, one_shorter = one_shorter, current
    return result.reshape(length, batch).T


@dataclass(frozen=True)
class MemoryHorizon(CheckedTask):
    """The Memory Horizon task and its configuration; the defaults are the paper's table 2.

        target_n = compress(x_{r+1}, ..., x_n)   with r the latest reset at or before n

    Every position has a target, and the group of a position is its span, n - r. Inputs are the numbers
    0 .. `max_number` and the reset token `max_number + 1`; targets are 0 .. `modulus` - 1. The data depend
    only on the fields below; splits have no samples in common. Test samples are drawn first, then validation
    samples, then training samples, so that a larger `n_samples` does not change the held-out samples.

    Args:
        max_number: largest input number.
        length: number of tokens per sample, including resets.
        n_resets: number of reset tokens per sample.
        modulus: number of target classes (the "maximal output" of table 2).
        n_samples: total number of samples in all three splits.
        n_validation: number of validation samples.
        n_test: number of test samples.
        seed: seed of the data only.

    Raises:
        ValueError: a field is out of range, or there are fewer distinct sequences than `n_samples`.

    Source: GateLoop (Katsch 2023), section 5.1, appendix A, table 2. The module's docstring lists choices
    where the paper gives no details.

    Example:
        >>> task = MemoryHorizon(length=12, n_resets=1, n_samples=10, n_validation=2, n_test=2)
        >>> test = task.split("test")
        >>> test.inputs[1].tolist()  # 5 is the reset token
        [4, 0, 2, 5, 2, 1, 3, 3, 3, 4, 1, 0]
        >>> test.group[1].tolist()
        [1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 8]
        >>> test.targets[1].tolist()
        [4, 0, 8, 0, 2, 2, 5, 3, 6, 14, 4, 2]
        >>> task.score(test.targets, test)["accuracy"]
        1.0
    """

    max_number: int = 4
    length: int = 1024
    n_resets: int = 3
    modulus: int = 50
    n_samples: int = 2000
    n_validation: int = 100
    n_test: int = 200
    seed: int = 0
    section: ClassVar[str] = "task"
    n_features: ClassVar[int | None] = None
    per_sequence: ClassVar[bool] = False
    objective: ClassVar[ObjectiveName] = "classification"
    least: ClassVar[Mapping[str, int]] = dict(
        max_number=0, length=1, n_resets=0, modulus=1, n_validation=1, n_test=1, seed=0
    )

    def check(self) -> None:
        """Require positions for the resets, and enough different sequences."""
        if self.n_resets > self.length:
            raise ValueError(
                f"`n_resets` must be at most `length` = {self.length}; got {self.n_resets}. "
                "Resets have distinct positions: pass fewer resets or a greater length."
            )
        held_out = self.n_validation + self.n_test
        if self.n_samples <= held_out:
            raise ValueError(
                f"`n_samples` must exceed `n_validation` + `n_test` = {held_out}; got {self.n_samples}. "
                "It is the total of all three splits."
            )
        n_numbers = self.length - self.n_resets
        # the exponent is capped, because larger powers exceed every number of samples and may take forever
        n_sequences = math.comb(self.length, self.n_resets) * (self.max_number + 1) ** min(n_numbers, 64)
        if self.n_samples > n_sequences:
            raise ValueError(
                f"`n_samples` must be at most {n_sequences}, the number of different sequences that "
                f"`length` = {self.length}, `n_resets` = {self.n_resets} and `max_number` = "
                f"{self.max_number} allow; got {self.n_samples}. Pass a greater length or fewer samples."
            )

    @property
    def reset_token(self) -> int:
        """The token that empties the list, the last token of the vocabulary."""
        return self.max_number + 1

    @property
    def vocab_size(self) -> int:
        """Vocabulary size: the numbers and the reset token."""
        return self.max_number + 2

    @property
    def n_outputs(self) -> int:
        """Number of target classes."""
        return self.modulus

    @property
    def chance(self) -> float:
        """Expected accuracy of a uniform guess: 1 / modulus."""
        return 1 / self.modulus

    @cached_property
    def trivial_score(self) -> float:
        """Test accuracy of always predicting the most frequent target of the training split."""
        majority = torch.bincount(self.split("train").targets.flatten()).argmax()
        return float((self.split("test").targets == majority).double().mean())

    def score(self, predictions: Int64[Tensor, "n t"], split: Split) -> dict[str, Any]:
        """Return scores of predictions on a split.

        Args:
            predictions: predicted classes, shape (n, t), any integer dtype, on any device.
            split: the split of the targets.

        Returns:
            JSON values. "accuracy" is the fraction of correct positions. "accuracy_by_span" lists
            {"span": [lo, hi], "accuracy", "count"} for spans 0, 1-10, 11-25, 26-50, 51-100, 101-200 and
            above, as far as they occur. "span_curve" is the paper's figure 7: {"width": w, "accuracy": [...],
            "count": [...]}, where entry i covers spans w i + 1 to w i + w, and is None for spans that do not
            occur; w is 10 from length 500 on, and smaller for shorter sequences.
        """
        at_each, counted = compared(predictions, split.targets)
        right = at_each[counted].numpy()
        # all splits of this task have spans as groups
        assert split.group is not None
        span = split.group[counted].numpy()

        longest = int(span.max(initial=0))
        uppers = [edge for edge in SPAN_EDGES if edge < longest] + [longest]
        lowers = [0, *(upper + 1 for upper in uppers)]
        bins = []
        for low, high in zip(lowers, uppers, strict=False):
            inside = (span >= low) & (span <= high)
            if count := int(inside.sum()):
                bins.append({"span": [low, high], "accuracy": float(right[inside].mean()), "count": count})

        width = min(10, max(1, self.length // 50))
        # rounding up puts only span 0 into bin 0, which the curve leaves out
        place = (span + width - 1) // width
        counts = np.bincount(place)[1:]
        rights = np.bincount(place, weights=right)[1:]
        curve = [
            round(r / c, 4) if c else None for r, c in zip(rights.tolist(), counts.tolist(), strict=True)
        ]
        return {
            "accuracy": float(right.mean()) if right.size else 0.0,
            "accuracy_by_span": bins,
            "span_curve": {"width": width, "accuracy": curve, "count": counts.tolist()},
        }

    @cached_property
    def _splits(self) -> dict[SplitName, Split]:
        inputs = self._draw()
        is_reset = inputs == self.reset_token
        position = np.arange(self.length)
        latest_reset = np.maximum.accumulate(np.where(is_reset, position, -1), axis=1)
        span = position - latest_reset
        # blocks of 64 samples fit into the processor's cache
        targets = np.concatenate(
            [
                compress_suffixes(inputs[rows : rows + 64], span[rows : rows + 64], self.modulus)
                for rows in range(0, self.n_samples, 64)
            ]
        )
        held_out = self.n_test + self.n_validation
        rows = {
            "test": slice(0, self.n_test),
            "validation": slice(self.n_test, held_out),
            "train": slice(held_out, None),
        }
        return {
            name: Split(
                inputs=torch.from_numpy(inputs[rows[name]].copy()),
                targets=torch.from_numpy(targets[rows[name]].copy()),
                group=torch.from_numpy(span[rows[name]].copy()),
            )
            for name in SPLIT_NAMES
        }

    def _draw(self) -> NDArray[np.int64]:
        """Draw `n_samples` distinct sequences, shape (n_samples, length)."""
        number_seed, reset_seed = np.random.SeedSequence(self.seed).spawn(2)
        number_rng, reset_rng = np.random.default_rng(number_seed), np.random.default_rng(reset_seed)

        def draw(n: int) -> NDArray[np.int64]:
            drawn = number_rng.integers(0, self.max_number + 1, size=(n, self.length), dtype=np.int64)
            # the positions of the smallest of independent uniform numbers are uniform without repetition
            resets = np.argsort(reset_rng.random((n, self.length)), axis=1)[:, : self.n_resets]
            np.put_along_axis(drawn, resets, self.reset_token, axis=1)
            return drawn

        # no limit of tries: there are enough sequences, but finding the last of them may take many rounds
        rounds = draw_distinct(
            draw, self.n_samples, rows=lambda drawn: drawn, name=type(self).__name__, tries=math.inf
        )
        return np.concatenate([drawn[new] for drawn, new in rounds])
