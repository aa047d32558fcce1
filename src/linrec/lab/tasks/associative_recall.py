"""Associative recall: recall the value of a key from many key-value pairs.

Source: Ba and others (2016, arXiv:1610.06258) for the task; the released code of H3 (Fu and others 2023,
arXiv:2212.14052) and Hyena (Poli and others 2023, arXiv:2302.10866) for the layout, with repeated keys.
"""

from dataclasses import dataclass

import numpy as np

from linrec.lab.tasks.base import NO_TARGET, require_at_least
from linrec.lab.tasks.drawing import first_alike, one_of
from linrec.lab.tasks.recall import RecallTask
from linrec.lab.tasks.synthetic import Drawn

__all__ = ["AssociativeRecall"]


@dataclass(frozen=True, kw_only=True)
class AssociativeRecall(RecallTask):
    """Recall the value of a key from a sequence of key-value pairs.

        x = k_1 v_1 k_2 v_2 .. k_P v_P question k,   v_i = m(k_i)
        y = m(k) at the last step

    Every sample has its own random map m from keys to values, and keys may repeat. The last key is uniform
    among the distinct keys that were shown. Tokens are the keys 0 .. `n_keys` - 1, then the values, the
    question, and "absent".

    The defaults follow H3's code with 20 tokens. H3 also has 4 keys and 4 values at length 20, Hyena has 14
    keys and 14 values at lengths up to 131,072; all are trained with `predict_all`.

    Args:
        length: number of tokens in the pairs, 2 P; even.
        n_keys: number of distinct keys.
        n_values: number of distinct values.
        absent: whether the last key is uniform among all keys; for a key that was not shown, the target is
            "absent".
        predict_all: see `RecallTask`. Mamba learns the task with it, but not without it.

    Source: H3 (Fu and others, 2023); Hyena (Poli and others, 2023).

    Example:
        >>> task = AssociativeRecall(length=6, n_train=1, n_validation=1, n_test=1)
        >>> task.split("test").inputs.tolist(), task.split("test").targets[0, -1:].tolist()
        ([[1, 15, 4, 15, 0, 12, 18, 4]], [15])
    """

    length: int = 40
    n_keys: int = 9
    n_values: int = 9
    absent: bool = False
    n_train: int = 5_000
    n_validation: int = 500
    n_test: int = 500

    def __post_init__(self) -> None:
        require_at_least(self, length=2, n_keys=2, n_values=2)
        if self.length % 2:
            raise ValueError(f"`length` must be even, two tokens per pair; got {self.length}.")
        super().__post_init__()

    @property
    def vocab_size(self) -> int:
        """Vocabulary size: keys, values, question, "absent"."""
        return self.n_keys + self.n_values + 2

    @property
    def n_outputs(self) -> int:
        """Number of target classes: the vocabulary size."""
        return self.vocab_size

    @property
    def chance(self) -> float:
        """Expected accuracy of a uniform guess among the answers."""
        return 1 / (self.n_values + self.absent)

    def draw(self, random: np.random.Generator, n: int) -> Drawn:
        """Draw n samples of length + 2 steps."""
        question = self.n_keys + self.n_values
        keys = random.integers(0, self.n_keys, (n, self.length // 2))
        first = first_alike(keys)
        values = random.integers(self.n_keys, question, keys.shape)
        values = np.take_along_axis(values, first, axis=1)
        rows = np.arange(n)
        if self.absent:
            asked = random.integers(0, self.n_keys, n)
            found = keys == asked[:, None]
            answer = np.where(found.any(1), values[rows, found.argmax(1)], question + 1)
        else:
            pair = one_of(random, first == np.arange(keys.shape[1]))
            asked, answer = keys[rows, pair], values[rows, pair]
        inputs = np.empty((n, self.length + 2), np.int64)
        inputs[:, 0:-2:2], inputs[:, 1:-2:2] = keys, values
        inputs[:, -2], inputs[:, -1] = question, asked
        targets = np.full_like(inputs, NO_TARGET)
        targets[:, -1] = answer
        return Drawn(inputs, targets)
