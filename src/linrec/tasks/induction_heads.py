"""Induction heads: when the trigger comes again, say what followed it before.

Source: Olsson and others (2022, arXiv:2209.11895) for the name; H3 (Fu and others 2023, arXiv:2212.14052) for
the task, with 20 tokens and a length of 30 in its code; Mamba (Gu and Dao 2023, arXiv:2312.00752, section
4.1.2) for training at a length of 256 with 16 symbols, and testing up to 2^20 = 1,048,576.
"""

from dataclasses import dataclass

import numpy as np

from linrec.tasks.base import NO_TARGET, require_at_least
from linrec.tasks.recall import RecallTask
from linrec.tasks.synthetic import Drawn

__all__ = ["InductionHeads"]


@dataclass(frozen=True, kw_only=True)
class InductionHeads(RecallTask):
    """Say what followed a trigger that stood anywhere.

        x = .. trigger s_1 .. s_M .. trigger s_1 .. s_{M-1}
        y = none, s_1 .. s_M at the last M steps

    A model has to keep what follows the trigger, and nothing else, for as long as it takes. Tokens are the
    symbols 0 .. `n_symbols` - 1 and the trigger `n_symbols`, which stands once, anywhere, among uniform
    symbols and once after them. The defaults are those of Mamba; `length=30, n_symbols=18, n_train=5000,
    n_test=500, fresh=False, predict_all=True` are those of H3's code, which has a further token that never
    occurs.

    Args:
        length: tokens before the trigger that asks.
        n_symbols: different symbols.
        n_copied: symbols to say, M; the inputs show those that were right.
        fresh: whether every epoch draws training samples of its own; else they are the same again.
        predict_all: see `RecallTask`.

    Source: H3 (Fu and others, 2023); Mamba (Gu and Dao, 2023), section 4.1.2.

    Example:
        >>> task = InductionHeads(length=6, n_train=1, n_validation=1, n_test=1)
        >>> task.split("test").inputs.tolist(), task.split("test").targets[0, -1:].tolist()
        ([[16, 9, 10, 14, 13, 2, 16]], [9])
    """

    length: int = 256
    n_symbols: int = 16
    n_copied: int = 1
    fresh: bool = True

    def __post_init__(self) -> None:
        require_at_least(self, n_symbols=2, n_copied=1)
        if self.length < 1 + self.n_copied:
            raise ValueError(
                f"`length` must be at least 1 + `n_copied` = {1 + self.n_copied}; got {self.length}. A "
                "trigger and what follows it come before the question."
            )
        super().__post_init__()

    @property
    def vocab_size(self) -> int:
        """Number of input tokens: symbols, trigger."""
        return self.n_symbols + 1

    @property
    def n_outputs(self) -> int:
        """Number of target classes: those of the tokens."""
        return self.vocab_size

    @property
    def chance(self) -> float:
        """Expected accuracy of a uniform guess among the symbols."""
        return 1 / self.n_symbols

    def draw(self, random: np.random.Generator, n: int) -> Drawn:
        """Draw n samples of length + n_copied steps."""
        length, copied = self.length, self.n_copied
        tokens = random.integers(0, self.n_symbols, (n, length + copied))
        place = random.integers(0, length - copied, (n, 1))
        np.put_along_axis(tokens, place, self.n_symbols, axis=1)
        answer = np.take_along_axis(tokens, place + np.arange(1, 1 + copied), axis=1)
        tokens[:, length], tokens[:, length + 1 :] = self.n_symbols, answer[:, :-1]
        targets = np.full_like(tokens, NO_TARGET)
        targets[:, length:] = answer
        return Drawn(tokens, targets)
