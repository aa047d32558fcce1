"""Copying: repeat the symbols at the beginning after a delay of known length.

Source: Arjovsky, Shah and Bengio (2016), arXiv:1511.06464, section 5.1, after Hochreiter and Schmidhuber
(1997), where the delay is `length` blanks, ten symbols come from an alphabet of eight, and a marker asks for
each of them; so laid out in S4's code.
"""

from dataclasses import dataclass

import numpy as np

from linrec.tasks.base import NO_TARGET, require_at_least
from linrec.tasks.synthetic import Drawn, SyntheticTask

__all__ = ["Copying"]


@dataclass(frozen=True, kw_only=True)
class Copying(SyntheticTask):
    """Repeat the first symbols when markers ask for them.

        x = s_1 ... s_M, blank * length, marker * M
        y = none * (M + length), s_1 ... s_M

    Where each symbol stands is known beforehand, so that a model with fixed transitions can solve it. Tokens
    are the blank 0, the symbols 1 .. `n_symbols`, and the marker `n_symbols` + 1.

    Args:
        length: blanks between the symbols and the markers.
        n_copied: symbols to repeat, M.
        n_symbols: different symbols.
        reverse: whether the last symbol is asked for first.
        fresh: whether every epoch draws training samples of its own, as in S4's code, of 10,000 too; else
            they are the same again.

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
        """Number of input tokens: blank, symbols, marker."""
        return self.n_symbols + 2

    @property
    def n_outputs(self) -> int:
        """Number of target classes: those of the tokens."""
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
