"""Memorization: learn a fixed map from keys to values in the parameters.

Source: MAD (Poli and others 2024, arXiv:2403.17844), "memorization".
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Int64

from linrec.lab.tasks.base import NO_TARGET, require_at_least
from linrec.lab.tasks.drawing import noisy, require_noise
from linrec.lab.tasks.synthetic import Drawn, SyntheticTask

__all__ = ["Memorization"]


@dataclass(frozen=True, kw_only=True)
class Memorization(SyntheticTask):
    """Output the value of each key from memory: values occur only as training targets.

        x = k_1 blank k_2 blank .. k_P blank
        y = m(k_i) at the blank after k_i

    The map m is a random permutation that depends on `seed` only: it is the same for all samples, splits and
    lengths. The inputs contain no values, so the model must store the map in its parameters. Test sequences
    are new, but their keys have the same values. Tokens are the keys 0 .. `n_facts` - 1, the blank, and
    noise; target classes are the values.

    Args:
        length: number of steps; even.
        n_facts: number of distinct keys, which is also the number of values.
        n_noise: number of distinct noise tokens.
        noise: probability that two noise tokens replace a key and its blank, in [0, 1); at least one key is
            kept.

    Source: MAD (Poli and others, 2024): 127 keys, a length of 32, 256 training samples and 1,280 test
        samples.

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
            raise ValueError(f"`length` must be even, a blank after every key; got {self.length}.")
        require_noise(self.noise, self.n_noise)
        super().__post_init__()

    @cached_property
    def values(self) -> Int64[np.ndarray, "facts"]:
        """The map m: the value of every key, shape (n_facts), int64."""
        return np.random.default_rng([self.seed, self.n_facts]).permutation(self.n_facts)

    @property
    def vocab_size(self) -> int:
        """Vocabulary size: keys, blank, noise."""
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
