"""Noisy recall: in-context recall among tokens that mean nothing.

Source: MAD (Poli and others 2024, arXiv:2403.17844), "noisy in-context recall".
"""

from dataclasses import dataclass

import numpy as np

from linrec.tasks.drawing import noisy, require_noise
from linrec.tasks.in_context_recall import InContextRecall
from linrec.tasks.synthetic import Drawn

__all__ = ["NoisyRecall"]


@dataclass(frozen=True, kw_only=True)
class NoisyRecall(InContextRecall):
    """Say the value of every key that was shown before, with noise in place of some pairs.

        x = k_1 v_1 z z k_2 v_2 ..,   v_i = m(k_i),   z uniform among tokens of their own
        y = v_i at k_i, where k_i is one of k_1 .. k_{i-1}

    Each pair but the last is replaced by two tokens of noise with the probability `noise`; one pair at least
    stays. Noise is no target even with `predict_all`, whereas MAD trains on it. Tokens are keys, values,
    noise.

    Args:
        length: tokens of the pairs and the noise, even; a sample has one step less.
        n_keys: different keys.
        n_values: different values.
        n_noise: different tokens of noise.
        noise: share of pairs that are noise, at least 0, below 1.
        predict_all: see `RecallTask`.

    Source: MAD (Poli and others, 2024): as in-context recall, with 16 tokens of noise and a share of 0.2, and
        0.4, 0.6 and 0.8 when it is to be harder.

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
        """Number of input tokens: keys, values, noise."""
        return super().vocab_size + self.n_noise

    def draw(self, random: np.random.Generator, n: int) -> Drawn:
        """Draw n samples of length - 1 steps."""
        # the last pair asks
        noise = np.zeros((n, self.length // 2), np.bool_)
        noise[:, :-1] = noisy(random, n, noise.shape[1] - 1, self.noise)
        return self.with_noise(random, noise)
