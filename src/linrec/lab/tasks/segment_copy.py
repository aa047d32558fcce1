"""Segment copy: repeat what a sequence began with, many steps and segments later.

Source: Bulatov and others, Recurrent Memory Transformer (2022, arXiv:2207.06881): copy, reverse and
associative retrieval, with sequences that models cut into segments.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from linrec.lab.tasks.base import NO_TARGET, require_at_least
from linrec.lab.tasks.drawing import without_replacement
from linrec.lab.tasks.synthetic import Drawn, SyntheticTask
from linrec.rules import choice

__all__ = ["SegmentCopy"]

Kind = Literal["copy", "reverse", "associative"]


@dataclass(frozen=True, kw_only=True)
class SegmentCopy(SyntheticTask):
    """Repeat what a sequence began with, across the segments of a model.

        copy         x = s_1 .. s_M, noise * N, marker * M        y = s_1 .. s_M at the markers
        reverse      x = s_1 .. s_M, noise * N, marker * M        y = s_M .. s_1 at the markers
        associative  x = k_1 s_1 .. k_M s_M, noise * N, k'_1 .. k'_M        y = symbol of k'_i

    A model with segments of T steps, T less than N, answers from its memory alone. The keys of a sample are
    distinct, and k' is a random order of them. Tokens are the symbols 0 .. `n_symbols` - 1, the keys, the
    marker, then the noise.

    Args:
        length: number of steps; N is what the other parts leave.
        kind: "copy", "reverse" or "associative".
        n_copied: number of symbols to repeat, M.
        n_symbols: number of distinct symbols.
        n_keys: number of distinct keys, at least M with "associative".
        n_noise: number of distinct noise tokens; with 1, the noise is a blank.
        fresh: whether every epoch draws new training samples; if not, all epochs share the same samples.

    Raises:
        ValueError: a field is out of range, or there are more symbols than the sequence has room for.

    Source: Bulatov and others (2022), the synthetic tasks.

    Example:
        >>> task = SegmentCopy(length=6, n_copied=2, n_symbols=9, n_train=1, n_validation=1, n_test=1)
        >>> task.split("test").inputs.tolist(), task.split("test").targets.tolist()
        ([[7, 5, 26, 26, 25, 25]], [[-100, -100, -100, -100, 7, 5]])
    """

    length: int = 72
    kind: Kind = "copy"
    n_copied: int = 6
    n_symbols: int = 8
    n_keys: int = 16
    n_noise: int = 1
    fresh: bool = True

    def __post_init__(self) -> None:
        require_at_least(self, n_copied=1, n_symbols=2, n_noise=1)
        choice(Kind, kind=self.kind)
        if self.length < self._given + self.n_copied:
            raise ValueError(
                f"`length` must be at least {self._given + self.n_copied}, so that {self.n_copied} symbols "
                f"and their answers fit; got {self.length}."
            )
        if self.kind == "associative" and self.n_keys < self.n_copied:
            raise ValueError(
                f"`n_keys` must be at least `n_copied` = {self.n_copied}, because keys are distinct; "
                f"got {self.n_keys}."
            )
        super().__post_init__()

    @property
    def vocab_size(self) -> int:
        """Vocabulary size: symbols, keys, marker, noise."""
        return self.n_symbols + self.n_keys + 1 + self.n_noise

    @property
    def n_outputs(self) -> int:
        """Number of target classes: the symbols."""
        return self.n_symbols

    @property
    def chance(self) -> float:
        """Expected accuracy of a uniform guess among the symbols."""
        return 1 / self.n_symbols

    @property
    def _given(self) -> int:
        """Steps at the start that the answers depend on."""
        return self.n_copied * (2 if self.kind == "associative" else 1)

    def draw(self, random: np.random.Generator, n: int) -> Drawn:
        """Draw n samples of `length` steps."""
        copied, marker = self.n_copied, self.n_symbols + self.n_keys
        symbols = random.integers(0, self.n_symbols, (n, copied))
        inputs = random.integers(marker + 1, self.vocab_size, (n, self.length))
        targets = np.full((n, self.length), NO_TARGET, np.int64)
        if self.kind == "associative":
            keys = self.n_symbols + without_replacement(random, n, copied, self.n_keys)
            inputs[:, 0 : 2 * copied : 2], inputs[:, 1 : 2 * copied : 2] = keys, symbols
            order = without_replacement(random, n, copied, copied)
            inputs[:, -copied:] = np.take_along_axis(keys, order, axis=1)
            targets[:, -copied:] = np.take_along_axis(symbols, order, axis=1)
        else:
            inputs[:, :copied], inputs[:, -copied:] = symbols, marker
            targets[:, -copied:] = symbols[:, ::-1] if self.kind == "reverse" else symbols
        return Drawn(inputs, targets)
