"""Noisy recall: in-context recall among noise tokens.

Source: MAD (Poli and others 2024, arXiv:2403.17844), "noisy in-context recall".
"""

from dataclasses import dataclass

import numpy as np

from linrec.lab.tasks.drawing import noisy, require_noise
from linrec.lab.tasks.in_context_recall import InContextRecall
from linrec.lab.tasks.synthetic import Drawn

__all__ = ["NoisyRecall"]


@dataclass(frozen=True, kw_only=True)
class NoisyRecall(InContextRecall):
    """Recall the value of every key that occurred before, among noise tokens.

        x = k_1 v_1 z z k_2 v_2 ..,   v_i = m(k_i),   z uniform among noise tokens
        y = v_i at k_i, if k_i is among k_1 .. k_{i-1}

    Two noise tokens replace each pair except the last with probability `noise`; besides the last pair, at
    least one pair is kept. Noise is never a target, even with `predict_all`; MAD trains on noise, too. Tokens
    are keys, values, noise.

    Args:
        length: number of tokens in pairs and noise; even. A sample has `length` - 1 steps.
        n_keys: number of distinct keys.
        n_values: number of distinct values.
        n_noise: number of distinct noise tokens.
        noise: probability that noise replaces a pair, in [0, 1).
        predict_all: see `RecallTask`.

    Source: MAD (Poli and others, 2024): as in-context recall, with 16 noise tokens and a share of 0.2, and
        0.4, 0.6 and 0.8 as harder variants.

    Example:
        >>> task = NoisyRecall(length=10, n_keys=2, noise=0.5, n_train=1, n_validation=1, n_test=1)
        >>> task.split("test").inputs.tolist(), task.split("test").targets[0, -3:].tolist()
        ([[0, 6, 0, 6, 21, 10, 22, 12, 0]], [-100, -100, 6])
    """

    n_noise: int = 16
    noise: float = 0.2

    def __post_init__(self) -> None:
        require_noise(self.noise, self.n_noise)
        super().__post_init__()

    @property
    def vocab_size(self) -> int:
        """Vocabulary size: keys, values, noise."""
        return super().vocab_size + self.n_noise

    def draw(self, random: np.random.Generator, n: int) -> Drawn:
        """Draw n samples of length - 1 steps."""
        # the last pair is the query, and never noise
        noise = np.zeros((n, self.length // 2), np.bool_)
        noise[:, :-1] = noisy(random, n, noise.shape[1] - 1, self.noise)
        return self.with_noise(random, noise)
