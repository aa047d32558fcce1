"""Induction heads: when the trigger occurs again, output the symbols that followed it before.

Source: Olsson and others (2022, arXiv:2209.11895); H3 (Fu and others 2023, arXiv:2212.14052) for the form
with one trigger, with 20 tokens and a length of 30 in its code; Mamba (Gu and Dao 2023, arXiv:2312.00752,
section 4.1.2) for training at a length of 256 with 16 symbols, and testing up to 2^20 = 1,048,576.
"""

from dataclasses import dataclass

import numpy as np

from linrec.lab.tasks.base import NO_TARGET, require_at_least
from linrec.lab.tasks.recall import RecallTask
from linrec.lab.tasks.synthetic import Drawn

__all__ = ["InductionHeads"]


@dataclass(frozen=True, kw_only=True)
class InductionHeads(RecallTask):
    """Recall the symbols that followed a trigger at a random position.

        x = .. trigger s_1 .. s_M .. trigger s_1 .. s_{M-1}
        y = s_1 .. s_M at the last M steps

    A model must remember the symbols after the trigger, and ignore all other symbols. Tokens are the symbols
    0 .. `n_symbols` - 1 and the trigger `n_symbols`. The trigger occurs at a random position among uniform
    symbols, and again after them.

    The defaults follow Mamba. For H3's code, pass `length=30, n_symbols=18, n_train=5000, n_test=500,
    fresh=False, predict_all=True`; its vocabulary has an additional token that never occurs.

    Args:
        length: number of tokens before the second trigger.
        n_symbols: number of distinct symbols.
        n_copied: number of symbols to recall, M; the inputs contain the correct earlier answers.
        fresh: whether every epoch draws new training samples; if not, all epochs share the same samples.
        predict_all: see `RecallTask`.

    Source: Olsson and others (2022); H3 (Fu and others, 2023); Mamba (Gu and Dao, 2023), section 4.1.2.

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
                f"`length` must be at least 1 + `n_copied` = {1 + self.n_copied}; got {self.length}. The "
                "first trigger and its symbols come before the second trigger."
            )
        super().__post_init__()

    @property
    def vocab_size(self) -> int:
        """Vocabulary size: symbols, trigger."""
        return self.n_symbols + 1

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
        length, copied = self.length, self.n_copied
        tokens = random.integers(0, self.n_symbols, (n, length + copied))
        place = random.integers(0, length - copied, (n, 1))
        np.put_along_axis(tokens, place, self.n_symbols, axis=1)
        answer = np.take_along_axis(tokens, place + np.arange(1, 1 + copied), axis=1)
        tokens[:, length], tokens[:, length + 1 :] = self.n_symbols, answer[:, :-1]
        targets = np.full_like(tokens, NO_TARGET)
        targets[:, length:] = answer
        return Drawn(tokens, targets)
