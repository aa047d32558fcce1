"""Fuzzy recall: in-context recall in which keys and values span several tokens.

Source: MAD (Poli and others 2024, arXiv:2403.17844), "fuzzy in-context recall".
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from linrec.lab.tasks.base import NO_TARGET, require_at_least
from linrec.lab.tasks.drawing import first_alike, one_of, places, without_replacement
from linrec.lab.tasks.recall import RecallTask
from linrec.lab.tasks.synthetic import Drawn

__all__ = ["FuzzyRecall"]


@dataclass(frozen=True, kw_only=True)
class FuzzyRecall(RecallTask):
    """Recall the value of every repeated key, where keys and values span several tokens.

        x = padding .. K_1 V_1 K_2 V_2 .. K_P V_P,   V_i = m(K_i)
        y = the next token, if it belongs to a V_i whose key K_i is among K_1 .. K_{i-1}

    A key has 1 to `key_size` distinct tokens, a value 1 to `value_size`; sizes are uniform. A key may be the
    prefix of another key. The last key repeats the key of a random earlier pair. A sample has as many pairs
    as are sure to fit, after padding at the start. Tokens are the key tokens 0 .. `n_keys` - 1, then the
    value tokens, and the padding.

    Scores are grouped by the size of the key; MAD tests only keys of `key_size` tokens. The other defaults
    follow MAD, which trains with `predict_all`, on padding, too.

    Args:
        length: number of tokens in pairs and padding. The last token is only a target, so a sample has
            `length` - 1 steps; MAD has an additional padding step.
        n_keys: number of distinct key tokens.
        n_values: number of distinct value tokens.
        key_size: maximum number of tokens in a key.
        value_size: maximum number of tokens in a value.
        predict_all: see `RecallTask`.

    Source: MAD (Poli and others, 2024): a vocabulary of 16, a length of 128, keys and values of at most 3
        tokens, 12,800 training samples and 1,280 test samples.

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
                f"pair can occur twice; got {self.length}."
            )
        super().__post_init__()

    @property
    def widest(self) -> int:
        """Maximum number of tokens in a pair."""
        return self.key_size + self.value_size

    @property
    def vocab_size(self) -> int:
        """Vocabulary size: key tokens, value tokens, padding."""
        return self.n_keys + self.n_values + 1

    @property
    def n_outputs(self) -> int:
        """Number of target classes: key tokens and value tokens."""
        return self.n_keys + self.n_values

    @property
    def chance(self) -> float:
        """Expected accuracy of a uniform guess among the value tokens."""
        return 1 / self.n_values

    def draw(self, random: np.random.Generator, n: int) -> Drawn:
        """Draw n samples of length - 1 steps."""
        length, rows, most = self.length, np.arange(n), self.length // 2
        keys, key_sizes = self._motifs(random, n, most, self.n_keys, self.key_size)
        values, value_sizes = self._motifs(random, n, most, self.n_values, self.value_size)
        # a unique number for every key, whose digits are its tokens plus 1, and 0 for absent tokens
        tokens = np.where(np.arange(self.key_size) < key_sizes[..., None], keys + 1, 0)
        first = first_alike(tokens @ (self.n_keys + 1) ** np.arange(self.key_size))
        ends = np.cumsum(key_sizes + value_sizes[rows[:, None], first], axis=1)
        # leave enough space for the longest possible last pair
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
