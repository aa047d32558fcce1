"""Associative recall: of many pairs of a key and a value, say the value of one key.

Source: Ba and others (2016, arXiv:1610.06258) for the task; H3 (Fu and others 2023, arXiv:2212.14052) and
Hyena (Poli and others 2023, arXiv:2302.10866) as laid out in their code, with keys that come again.
"""

from dataclasses import dataclass

import numpy as np

from linrec.tasks.base import NO_TARGET, require_at_least
from linrec.tasks.drawing import first_alike, one_of
from linrec.tasks.recall import RecallTask
from linrec.tasks.synthetic import Drawn

__all__ = ["AssociativeRecall"]


@dataclass(frozen=True, kw_only=True)
class AssociativeRecall(RecallTask):
    """Say the value that a key has in this sequence.

        x = k_1 v_1 k_2 v_2 .. k_P v_P question k,   v_i = m(k_i)
        y = m(k) at the last step

    The map m from keys to values is drawn anew for every sample; keys come as often as it happens. The last
    key is, uniformly, one of those that were shown. Tokens are the keys 0 .. `n_keys` - 1, then the values,
    the question, and "absent". The defaults are those of H3's code with 20 tokens; it has 4 + 4 at a length
    of 20 too, Hyena 14 + 14 at up to 131,072, and all are trained with `predict_all`.

    Args:
        length: tokens of the pairs, 2 P, even.
        n_keys: different keys.
        n_values: different values.
        absent: whether the last key is uniform among all keys; if it was not shown the target is "absent".
        predict_all: see `RecallTask`. Mamba is known to learn the task with it, and not without.

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
            raise ValueError(f"`length` must be even, two tokens a pair; got {self.length}.")
        super().__post_init__()

    @property
    def vocab_size(self) -> int:
        """Number of input tokens: keys, values, question, "absent"."""
        return self.n_keys + self.n_values + 2

    @property
    def n_outputs(self) -> int:
        """Number of target classes: those of the tokens."""
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
