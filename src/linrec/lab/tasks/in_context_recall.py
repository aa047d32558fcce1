"""In-context recall: whenever a key occurs again, recall its value.

Source: MAD (Poli and others 2024, arXiv:2403.17844), the first of its six tasks.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool

from linrec.lab.tasks.base import NO_TARGET, require_at_least
from linrec.lab.tasks.drawing import first_alike, one_of
from linrec.lab.tasks.recall import RecallTask
from linrec.lab.tasks.synthetic import Drawn

__all__ = ["InContextRecall"]


@dataclass(frozen=True, kw_only=True)
class InContextRecall(RecallTask):
    """Recall the value of every key that occurred before in the sequence.

        x = k_1 v_1 k_2 v_2 .. k_P,   v_i = m(k_i)
        y = v_i at k_i, if k_i is among k_1 .. k_{i-1}

    Every sample has its own random map m from keys to values. Keys are uniform, except for the last key,
    which is uniform among the distinct keys that were shown. Tokens are the keys 0 .. `n_keys` - 1, then the
    values. The defaults follow MAD, which trains with `predict_all`.

    Args:
        length: number of tokens in the pairs, 2 P; even. The last value is only a target, so a sample has
            `length` - 1 steps.
        n_keys: number of distinct keys.
        n_values: number of distinct values.
        predict_all: see `RecallTask`.

    Source: MAD (Poli and others, 2024): a vocabulary of 16, a length of 128, 12,800 training samples and
        1,280 test samples.

    Example:
        >>> task = InContextRecall(length=8, n_keys=2, n_train=1, n_validation=1, n_test=1)
        >>> task.split("test").inputs.tolist(), task.split("test").targets.tolist()
        ([[0, 8, 1, 9, 1, 9, 0]], [[-100, -100, -100, -100, 9, -100, 8]])
    """

    length: int = 128
    n_keys: int = 8
    n_values: int = 8
    n_train: int = 12_800
    n_validation: int = 1_280
    n_test: int = 1_280

    def __post_init__(self) -> None:
        require_at_least(self, length=4, n_keys=2, n_values=2)
        if self.length % 2:
            raise ValueError(f"`length` must be even, two tokens per pair; got {self.length}.")
        super().__post_init__()

    @property
    def vocab_size(self) -> int:
        """Vocabulary size: keys, values."""
        return self.n_keys + self.n_values

    @property
    def n_outputs(self) -> int:
        """Number of target classes: keys and values."""
        return self.n_keys + self.n_values

    @property
    def chance(self) -> float:
        """Expected accuracy of a uniform guess among the values."""
        return 1 / self.n_values

    def draw(self, random: np.random.Generator, n: int) -> Drawn:
        """Draw n samples of length - 1 steps."""
        return self.with_noise(random, np.zeros((n, self.length // 2), np.bool_))

    def with_noise(self, random: np.random.Generator, noise: Bool[np.ndarray, "n p"]) -> Drawn:
        """Draw samples in which two random noise tokens replace some pairs.

        Args:
            random: the random generator.
            noise: mask of the pairs to replace, shape (n, p), bool; at least one pair besides the last pair
                must remain, and the last pair must not be replaced.
        """
        keys = random.integers(0, self.n_keys, noise.shape)
        # unique numbers for noise pairs, so that they match no key
        keys = np.where(noise, -1 - np.arange(noise.shape[1]), keys)
        shown = first_alike(keys[:, :-1]) == np.arange(noise.shape[1] - 1)
        last = one_of(random, shown & ~noise[:, :-1])
        keys[:, -1] = np.take_along_axis(keys, last[:, None], axis=1)[:, 0]
        first = first_alike(keys)
        values = random.integers(self.n_keys, self.n_outputs, noise.shape)
        values = np.take_along_axis(values, first, axis=1)
        tokens = np.stack([keys, values], axis=2)
        if noise.any():
            tokens[noise] = random.integers(self.n_outputs, self.vocab_size, (int(noise.sum()), 2))
        targets = np.full_like(tokens, NO_TARGET)
        targets[..., 0] = np.where(first < np.arange(noise.shape[1]), values, NO_TARGET)
        # the last value is only a target
        inputs, targets = (part.reshape(len(noise), -1)[:, :-1].copy() for part in (tokens, targets))
        return Drawn(inputs, targets)
