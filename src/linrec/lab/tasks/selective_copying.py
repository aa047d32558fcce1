"""Selective copying: repeat the symbols that are scattered among blanks.

Source: Jing and others (Gated Orthogonal Recurrent Units, 2019, arXiv:1706.02761), as the denoise task. Mamba
(Gu and Dao 2023, arXiv:2312.00752) made it widely known, in section 4.1.1 and figure 2: 4,096 steps, 16
symbols to copy from an alphabet of 16, and no released code. MAD (Poli and others 2024, arXiv:2403.17844) has
a similar, smaller setting with 256 steps and a vocabulary of 16. The layout follows S4's generator, with a
marker for each symbol. MAD has a single marker, followed by blanks at the positions of the answers, within
its 256 steps; its code puts no blank after the last symbol.
"""

from dataclasses import dataclass

import numpy as np

from linrec.lab.tasks.base import NO_TARGET, require_at_least
from linrec.lab.tasks.synthetic import Drawn, SyntheticTask

__all__ = ["SelectiveCopying"]


@dataclass(frozen=True, kw_only=True)
class SelectiveCopying(SyntheticTask):
    """Repeat the symbols that are scattered among blanks, in their order.

        x = s_1 .. s_M at random positions of the first `length` steps, blanks elsewhere; then marker * M
        y = (no target) * length, s_1 ... s_M

    The state update must depend on the token, so a model with fixed transitions cannot solve the task. Tokens
    are the blank 0, the symbols 1 .. `n_symbols`, and the marker `n_symbols` + 1.

    Args:
        length: number of steps before the markers, including the symbols.
        n_copied: number of symbols to repeat, M.
        n_symbols: number of distinct symbols.
        fresh: whether every epoch draws new training samples, as for Mamba; if not, all epochs share the same
            samples, as in MAD, which has 12,800 training samples and 1,280 test samples.

    Source: Jing and others (2019), the denoise task; Mamba (Gu and Dao 2023), section 4.1.1.

    Example:
        >>> task = SelectiveCopying(length=6, n_copied=2, n_train=1, n_validation=1, n_test=1)
        >>> task.split("test").inputs.tolist(), task.split("test").targets[0, -2:].tolist()
        ([[0, 6, 0, 0, 12, 0, 15, 15]], [6, 12])
    """

    length: int = 256
    n_copied: int = 16
    n_symbols: int = 14

    def __post_init__(self) -> None:
        require_at_least(self, n_copied=1, n_symbols=2)
        if self.length < self.n_copied:
            raise ValueError(
                f"`length` must be at least `n_copied` = {self.n_copied}; got {self.length}. The symbols to "
                "copy have distinct positions: pass a greater length or fewer symbols."
            )
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
        """Draw n samples of length + n_copied steps."""
        copied, steps = self.n_copied, self.length + self.n_copied
        symbols = random.integers(1, self.n_symbols + 1, (n, copied))
        # the positions of the smallest of independent numbers are a uniform choice without repetition
        places = np.argpartition(random.random((n, self.length)), copied - 1, axis=1)[:, :copied]
        inputs = np.zeros((n, steps), np.int64)
        np.put_along_axis(inputs, np.sort(places, axis=1), symbols, axis=1)
        inputs[:, -copied:] = self.n_symbols + 1
        targets = np.full((n, steps), NO_TARGET, np.int64)
        targets[:, -copied:] = symbols
        return Drawn(inputs, targets)
