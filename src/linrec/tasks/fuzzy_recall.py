"""Fuzzy recall: in-context recall where keys and values are a few tokens long.

Source: MAD (Poli and others 2024, arXiv:2403.17844), "fuzzy in-context recall".
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from linrec.tasks.base import NO_TARGET, require_at_least
from linrec.tasks.drawing import first_alike, one_of, places, without_replacement
from linrec.tasks.recall import RecallTask
from linrec.tasks.synthetic import Drawn

__all__ = ["FuzzyRecall"]


@dataclass(frozen=True, kw_only=True)
class FuzzyRecall(RecallTask):
    """Say the value of every key that was shown before, token by token.

        x = padding .. K_1 V_1 K_2 V_2 .. K_P V_P,   V_i = m(K_i)
        y = the next token, where it belongs to the V_i of a K_i that is one of K_1 .. K_{i-1}

    A key is 1 to `key_size` different tokens, a value 1 to `value_size`, both of uniform size, and one key
    may begin like another. The last key is that of one of the pairs before, uniformly. As many pairs as
    surely fit are drawn; padding comes first. Tokens are those of keys, 0 .. `n_keys` - 1, then those of
    values, and the padding. Scores tell apart how many tokens a key has: MAD tests keys of `key_size` tokens
    alone. The other defaults are MAD's; it trains with `predict_all`, there on padding too.

    Args:
        length: tokens of pairs and padding. The last one is only asked for, so that a sample has one step
            less; MAD has one step of padding more.
        n_keys: different tokens of keys.
        n_values: different tokens of values.
        key_size: most tokens of a key.
        value_size: most tokens of a value.
        predict_all: see `RecallTask`.

    Source: MAD (Poli and others, 2024): a vocabulary of 16, a length of 128, keys and values of at most 3
        tokens, 12,800 samples and 1,280 to test.

    Example:
        >>> task = FuzzyRecall(length=14, n_train=1, n_validation=1, n_test=1)
        >>> task.split("test").inputs.tolist(), task.split("test").targets[0, -4:].tolist()
        ([[15, 15, 4, 6, 2, 14, 9, 10, 4, 6, 2, 14, 9]], [-100, 14, 9, 10])
    """

    length: int = 128
    n_keys: int = 7
    n_values: int = 8
    key_size: int = 3
    value_size: int = 3
    n_train: int = 12_800
    n_validation: int = 1_280
    n_test: int = 1_280
    group_name: ClassVar[str] = "key_size"

    def __post_init__(self) -> None:
        require_at_least(
            self, key_size=1, value_size=1, n_keys=max(2, self.key_size), n_values=max(2, self.value_size)
        )
        if self.length < 2 * self.widest:
            raise ValueError(
                f"`length` must be at least 2 (`key_size` + `value_size`) = {2 * self.widest}, so that a "
                f"pair can come twice; got {self.length}."
            )
        super().__post_init__()

    @property
    def widest(self) -> int:
        """Most tokens of a pair."""
        return self.key_size + self.value_size

    @property
    def vocab_size(self) -> int:
        """Number of input tokens: those of keys and values, padding."""
        return self.n_keys + self.n_values + 1

    @property
    def n_outputs(self) -> int:
        """Number of target classes: tokens of keys and values."""
        return self.n_keys + self.n_values

    @property
    def chance(self) -> float:
        """Expected accuracy of a uniform guess among the tokens of values."""
        return 1 / self.n_values

    def draw(self, random: np.random.Generator, n: int) -> Drawn:
        """Draw n samples of length - 1 steps."""
        length, rows, most = self.length, np.arange(n), self.length // 2
        keys, key_sizes = self._motifs(random, n, most, self.n_keys, self.key_size)
        values, value_sizes = self._motifs(random, n, most, self.n_values, self.value_size)
        # a number for every key: its tokens from 1 on are digits, and 0 is none
        tokens = np.where(np.arange(self.key_size) < key_sizes[..., None], keys + 1, 0)
        first = first_alike(tokens @ (self.n_keys + 1) ** np.arange(self.key_size))
        ends = np.cumsum(key_sizes + value_sizes[rows[:, None], first], axis=1)
        # room for the last pair is left, however long it is
        fits = ends <= length - self.widest
        last, again = fits.sum(1), one_of(random, fits)
        for part in (keys, key_sizes, first):
            part[rows, last] = part[rows, again]
        values, value_sizes = self.n_keys + values[rows[:, None], first], value_sizes[rows[:, None], first]

        pair = np.arange(most)
        sizes = np.stack([key_sizes, value_sizes], axis=2) * (pair <= last[:, None])[..., None]
        kept = np.concatenate(
            [
                np.arange(most_tokens) < sizes[..., part, None]
                for part, most_tokens in enumerate((self.key_size, self.value_size))
            ],
            axis=2,
        )
        asked = np.zeros(kept.shape, np.bool_)
        asked[..., self.key_size :] = (first < pair)[..., None]
        cells = np.concatenate([keys, values], axis=2)
        row, column = places(kept.reshape(n, -1))
        column += (length - sizes.sum((1, 2)))[row]

        inputs = np.full((n, length), self.n_outputs)
        targets, group = np.full_like(inputs, NO_TARGET), np.zeros_like(inputs)
        inputs[row, column] = cells[kept]
        targets[row, column] = np.where(asked, cells, NO_TARGET)[kept]
        group[row, column] = np.broadcast_to(key_sizes[..., None], kept.shape)[kept]
        return Drawn(inputs[:, :-1].copy(), targets[:, 1:].copy(), group[:, 1:].copy())

    @staticmethod
    def _motifs(
        random: np.random.Generator, n: int, pairs: int, n_tokens: int, most: int
    ) -> tuple[np.ndarray, np.ndarray]:
        motifs = without_replacement(random, n * pairs, most, n_tokens).reshape(n, pairs, most)
        return motifs, random.integers(1, most + 1, (n, pairs))
