"""LSTM task 2b: remember the first symbol of a long sequence until its end.

Source: Hochreiter and Schmidhuber (1997), experiment 2b, with 100 steps; and the variant of Martin and Cundy
(2018), arXiv:1709.04057, with 1,024, 8,192 and 1,048,576 steps.
"""

from dataclasses import dataclass

import numpy as np

from linrec.lab.tasks.base import NO_TARGET, require_at_least
from linrec.lab.tasks.synthetic import Drawn, SyntheticTask

__all__ = ["LstmTask2b"]


@dataclass(frozen=True, kw_only=True)
class LstmTask2b(SyntheticTask):
    """Recall at the last step which of two symbols came first.

        x = s, a_1, ..., a_{length - 1},   s in {0, 1},   a_i uniform
        y = (no target) * (length - 1), s

    Tokens are 0 and 1 .. `n_symbols`. They correspond to the input vectors of Martin and Cundy: 0 to -e_1,
    and i to e_i, one-hot in `n_symbols` dimensions. Unlike these input vectors, the embeddings of 0 and 1
    need not be opposites. All symbols from 1 on may follow the first symbol.

    With `recurs` False, neither 0 nor 1 occurs again, as in Hochreiter and Schmidhuber. They predict the next
    symbol at every step, but only the last symbol is predictable.

    Args:
        length: number of steps; 1,024, 8,192 or 1,048,576 in Martin and Cundy, 100 in Hochreiter and
            Schmidhuber. Pass fewer samples for long sequences: a sample takes 16 bytes per step.
        n_symbols: number of symbols p; 128 in Martin and Cundy, 100 in Hochreiter and Schmidhuber.
        recurs: whether the symbol 1 may occur again.
        fresh: whether every epoch draws new training samples, as in both papers.

    See `DrawnTask` for the other fields. Martin and Cundy train with batches of 8 until 5 batches in a row
    are all correct: 550 batches at 1,024 steps.

    Source: Martin and Cundy (2018).

    Example:
        >>> task = LstmTask2b(length=5, n_symbols=9, n_train=1, n_validation=1, n_test=1)
        >>> task.split("test").inputs.tolist(), task.split("test").targets.tolist()
        ([[0, 3, 3, 7, 4]], [[-100, -100, -100, -100, 0]])
    """

    length: int = 1024
    n_train: int = 4000
    n_symbols: int = 128
    recurs: bool = True
    fresh: bool = True

    def __post_init__(self) -> None:
        require_at_least(self, length=2, n_symbols=2)
        super().__post_init__()

    @property
    def vocab_size(self) -> int:
        """Vocabulary size."""
        return self.n_symbols + 1

    @property
    def n_outputs(self) -> int:
        """Number of target classes: the two possible first symbols."""
        return 2

    @property
    def chance(self) -> float:
        """Expected accuracy of a uniform guess: 0.5."""
        return 1 / 2

    def draw(self, random: np.random.Generator, n: int) -> Drawn:
        """Draw n samples of `length` steps."""
        inputs = random.integers(1 if self.recurs else 2, self.n_symbols + 1, (n, self.length))
        inputs[:, 0] = random.integers(0, 2, n)
        targets = np.full((n, self.length), NO_TARGET, np.int64)
        targets[:, -1] = inputs[:, 0]
        return Drawn(inputs, targets)
