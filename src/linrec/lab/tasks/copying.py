"""Copying: repeat the first symbols of a sequence after a delay of known length.

Source: Arjovsky, Shah and Bengio (2016), arXiv:1511.06464, section 5.1, after Hochreiter and Schmidhuber
(1997), with ten symbols from an alphabet of eight. The layout follows S4's code: `length` blanks, then a
marker for each symbol to repeat.
"""

from dataclasses import dataclass

import numpy as np

from linrec.lab.tasks.base import NO_TARGET, require_at_least
from linrec.lab.tasks.synthetic import Drawn, SyntheticTask

__all__ = ["Copying"]


@dataclass(frozen=True, kw_only=True)
class Copying(SyntheticTask):
    """Repeat the first symbols of a sequence after a delay.

        x = s_1 ... s_M, blank * length, marker * M
        y = (no target) * (M + length), s_1 ... s_M

    The positions of the symbols are the same in all samples, so a model with fixed transitions can solve the
    task. Tokens are the blank 0, the symbols 1 .. `n_symbols`, and the marker `n_symbols` + 1.

    Args:
        length: number of blanks between the symbols and the markers.
        n_copied: number of symbols to repeat, M.
        n_symbols: number of distinct symbols.
        reverse: whether the symbols are repeated in reverse order.
        fresh: whether every epoch draws new training samples, as in S4's code, which also draws 10,000; if
            not, all epochs share the same samples.

    Source: Arjovsky, Shah and Bengio (2016), section 5.1.

    Example:
        >>> task = Copying(length=3, n_copied=2, n_train=1, n_validation=1, n_test=1)
        >>> task.split("test").inputs.tolist(), task.split("test").targets.tolist()
        ([[2, 7, 0, 0, 0, 9, 9]], [[-100, -100, -100, -100, -100, 2, 7]])
    """

    length: int = 100
    n_copied: int = 10
    n_symbols: int = 8
    reverse: bool = False
    fresh: bool = True

    def __post_init__(self) -> None:
        require_at_least(self, length=0, n_copied=1, n_symbols=2)
        super().__post_init__()

    @property
    def vocab_size(self) -> int:
        """Vocabulary size: blank, symbols, marker."""
        return self.n_symbols + 2

    @property
    def n_outputs(self) -> int:
        """Number of target classes: the vocabulary size."""
        return self.vocab_size

    @property
    def chance(self) -> float:
        """Expected accuracy of a uniform guess among the symbols."""
        return 1 / self.n_symbols

    def draw(self, random: np.random.Generator, n: int) -> Drawn:
        """Draw n samples of n_copied + length + n_copied steps."""
        copied, steps = self.n_copied, 2 * self.n_copied + self.length
        symbols = random.integers(1, self.n_symbols + 1, (n, copied))
        inputs = np.zeros((n, steps), np.int64)
        inputs[:, :copied], inputs[:, -copied:] = symbols, self.n_symbols + 1
        targets = np.full((n, steps), NO_TARGET, np.int64)
        targets[:, -copied:] = symbols[:, ::-1] if self.reverse else symbols
        return Drawn(inputs, targets)
