"""Compression: keep a whole string in the state, and output its symbols at given positions.

Source: MAD (Poli and others 2024, arXiv:2403.17844), "compression". In MAD, a decoder (an MLP) receives the
output at the last step and a position. In this task, the model itself receives positions as tokens.
"""

from dataclasses import dataclass

import numpy as np

from linrec.lab.tasks.base import NO_TARGET, require_at_least
from linrec.lab.tasks.drawing import noisy, require_noise, without_replacement
from linrec.lab.tasks.synthetic import Drawn, SyntheticTask

__all__ = ["Compression"]


@dataclass(frozen=True, kw_only=True)
class Compression(SyntheticTask):
    """Output the symbols of a string in random order after the string has ended.

        x = s_1 .. s_L end p_i p_j ..,   i, j, .. a random permutation of 1 .. L
        y = s_i at p_i

    A recurrent model must hold the whole string in its state at the end. Attention can look back instead, so
    unlike MAD's task, this task does not force attention to compress. Tokens are the symbols
    0 .. `n_symbols` - 1, noise, the end, and L positions. Noise is never a target; in MAD's code, noise is a
    target by mistake.

    Args:
        length: number of symbols and noise tokens before the end, L. `test_lengths` must not be larger,
            because larger positions have no token.
        n_symbols: number of distinct symbols.
        n_noise: number of distinct noise tokens.
        noise: probability that noise replaces a symbol, in [0, 1); at least one symbol is kept.

    Source: MAD (Poli and others, 2024): a vocabulary of 15 symbols and the end, strings of 31 symbols and the
        end, 12,800 training samples and 1,280 test samples.

    Example:
        >>> task = Compression(length=4, n_train=1, n_validation=1, n_test=1)
        >>> task.split("test").inputs.tolist(), task.split("test").targets[0, -4:].tolist()
        ([[0, 4, 12, 10, 15, 16, 19, 17, 18]], [0, 10, 4, 12])
    """

    length: int = 31
    n_symbols: int = 15
    n_noise: int = 0
    noise: float = 0.0
    n_train: int = 12_800
    n_validation: int = 1_280
    n_test: int = 1_280

    def __post_init__(self) -> None:
        require_at_least(self, length=1, n_symbols=2)
        require_noise(self.noise, self.n_noise)
        for length in self.test_lengths:
            if length > self.length:
                raise ValueError(
                    f"`test_lengths` must be at most `length` = {self.length}, because larger positions have "
                    f"no token; got {length}."
                )
        super().__post_init__()

    @property
    def vocab_size(self) -> int:
        """Vocabulary size: symbols, noise, end, positions."""
        return self.n_symbols + self.n_noise + 1 + self.length

    @property
    def n_outputs(self) -> int:
        """Number of target classes: the symbols."""
        return self.n_symbols

    @property
    def chance(self) -> float:
        """Expected accuracy of a uniform guess among the symbols."""
        return 1 / self.n_symbols

    def draw(self, random: np.random.Generator, n: int) -> Drawn:
        """Draw n samples of 2 * length + 1 steps."""
        end = self.n_symbols + self.n_noise
        string = random.integers(0, self.n_symbols, (n, self.length))
        answers = string
        if self.noise:
            noise = noisy(random, n, self.length, self.noise)
            answers = np.where(noise, NO_TARGET, string)
            string = np.where(noise, random.integers(self.n_symbols, end, string.shape), string)
        order = without_replacement(random, n, self.length, self.length)
        inputs = np.concatenate([string, np.full((n, 1), end), end + 1 + order], axis=1)
        targets = np.full_like(inputs, NO_TARGET)
        targets[:, -self.length :] = np.take_along_axis(answers, order, axis=1)
        return Drawn(inputs, targets)
