"""Memorization: learn facts that are the same in all samples.

Source: MAD (Poli and others 2024, arXiv:2403.17844), "memorization".
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Int64

from linrec.tasks.base import NO_TARGET, require_at_least
from linrec.tasks.drawing import noisy, require_noise
from linrec.tasks.synthetic import Drawn, SyntheticTask

__all__ = ["Memorization"]


@dataclass(frozen=True, kw_only=True)
class Memorization(SyntheticTask):
    """Say the value of each key, which only the training samples tell.

        x = k_1 blank k_2 blank .. k_P blank
        y = none m(k_1) none m(k_2) .. none m(k_P)

    One map m, one-to-one, holds for all samples, splits and lengths; `seed` makes it. Nothing in a sample
    tells it, so that the parameters have to keep it; sequences of test keys are new, the facts are not.
    Tokens are the keys 0 .. `n_facts` - 1, the blank, and noise; the values are classes of their own.

    Args:
        length: steps, even.
        n_facts: different keys, and as many values.
        n_noise: different tokens of noise.
        noise: probability of two tokens of noise in place of a key and its blank, at least 0, below 1; one
            key at least stays.

    Source: MAD (Poli and others, 2024): 127 keys, a length of 32, 256 samples to train and 1,280 to test.

    Example:
        >>> task = Memorization(length=4, n_facts=5, n_train=1, n_validation=1, n_test=1)
        >>> task.split("test").inputs.tolist(), task.split("test").targets.tolist(), task.values.tolist()
        ([[0, 5, 1, 5]], [[-100, 0, -100, 3]], [0, 3, 4, 1, 2])
    """

    length: int = 32
    n_facts: int = 127
    n_noise: int = 0
    noise: float = 0.0
    n_train: int = 256
    n_validation: int = 1_280
    n_test: int = 1_280

    def __post_init__(self) -> None:
        require_at_least(self, length=2, n_facts=2)
        if self.length % 2:
            raise ValueError(f"`length` must be even, a key and a blank each; got {self.length}.")
        require_noise(self.noise, self.n_noise)
        super().__post_init__()

    @cached_property
    def values(self) -> Int64[np.ndarray, "facts"]:
        """The map: value of every key, shape (n_facts), int64."""
        return np.random.default_rng([self.seed, self.n_facts]).permutation(self.n_facts)

    @property
    def vocab_size(self) -> int:
        """Number of input tokens: keys, blank, noise."""
        return self.n_facts + 1 + self.n_noise

    @property
    def n_outputs(self) -> int:
        """Number of target classes: the values."""
        return self.n_facts

    @property
    def chance(self) -> float:
        """Expected accuracy of a uniform guess among the values."""
        return 1 / self.n_facts

    def draw(self, random: np.random.Generator, n: int) -> Drawn:
        """Draw n samples."""
        keys = random.integers(0, self.n_facts, (n, self.length // 2))
        inputs = np.stack([keys, np.full_like(keys, self.n_facts)], axis=2)
        targets = np.stack([np.full_like(keys, NO_TARGET), self.values[keys]], axis=2)
        if self.noise:
            noise = noisy(random, n, keys.shape[1], self.noise)
            inputs[noise] = random.integers(self.n_facts + 1, self.vocab_size, (int(noise.sum()), 2))
            targets[noise] = NO_TARGET
        return Drawn(inputs.reshape(n, -1), targets.reshape(n, -1))
