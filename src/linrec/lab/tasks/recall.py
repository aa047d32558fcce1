"""Tasks of recall: give back the value or the symbols that followed a key earlier in the sequence.

The layouts of the released code of H3, Hyena and MAD end a sample with a query, and train on the next tokens
at all positions, which `predict_all` does too.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
from jaxtyping import Bool

from linrec.lab.tasks.base import NO_TARGET
from linrec.lab.tasks.drawing import first_alike, noisy, one_of, places, require_noise, without_replacement
from linrec.lab.tasks.synthetic import Alphabet, Drawn, SyntheticTask
from linrec.rules import at_least

__all__ = [
    "AssociativeRecall",
    "FuzzyRecall",
    "InContextRecall",
    "InductionHeads",
    "NoisyRecall",
    "RecallTask",
]


@dataclass(frozen=True, kw_only=True)
class RecallTask(SyntheticTask):
    """Base class of tasks with queries whose answer is the next token, so that every token can be a target.

    Args:
        predict_all: whether training targets are the next tokens at all positions, as in the code of H3,
            Hyena and MAD; if not, only the answers are training targets. Tokens that are not output classes,
            such as noise and padding, are never targets. Validation and test targets are always the answers.
    """

    predict_all: bool = False

    def for_training(self, drawn: Drawn) -> Drawn:
        """Return samples with the training targets: the next tokens if `predict_all`, else the answers."""
        if not self.predict_all:
            return drawn
        targets = drawn.targets.copy()
        # an answer is also the next token; the last target comes after the inputs and is kept
        targets[:, :-1] = np.where(drawn.inputs[:, 1:] < self.n_outputs, drawn.inputs[:, 1:], NO_TARGET)
        return drawn._replace(targets=targets)

    @cached_property
    def trivial_score(self) -> float:
        """Test accuracy of always predicting the most frequent answer of the training split."""
        if self.predict_all:
            # only answers count, not the other training targets
            return dataclasses.replace(self, predict_all=False).trivial_score
        return super().trivial_score


@dataclass(frozen=True, kw_only=True)
class AssociativeRecall(RecallTask):
    """Recall the value of a key from a sequence of key-value pairs.

        x = k_1 v_1 k_2 v_2 .. k_P v_P question k,   v_i = m(k_i)
        y = m(k) at the last step

    Every sample has its own random map m from keys to values, and keys may repeat. The last key is uniform
    among the distinct keys that were shown. Tokens are the keys 0 .. `n_keys` - 1, then the values, the
    question, and "absent".

    The defaults follow H3's code with 20 tokens. H3 also has 4 keys and 4 values at length 20, Hyena has 14
    keys and 14 values at lengths up to 131,072; all are trained with `predict_all`.

    Args:
        length: number of tokens in the pairs, 2 P; even.
        n_keys: number of distinct keys.
        n_values: number of distinct values.
        absent: whether the last key is uniform among all keys; for a key that was not shown, the target is
            "absent".
        predict_all: see `RecallTask`. Mamba learns the task with it, but not without it.

    Source: Ba and others (2016, arXiv:1610.06258) for the task; the released code of H3 (Fu and others 2023,
    arXiv:2212.14052) and Hyena (Poli and others 2023, arXiv:2302.10866) for the layout, with repeated keys.

    Example:
        >>> task = AssociativeRecall(length=6, n_train=1, n_validation=1, n_test=1)
        >>> task.split("test").inputs.tolist(), task.split("test").targets[0, -1:].tolist()
        ([[1, 15, 4, 15, 0, 12, 18, 4]], [15])
    """

    length: int = 40
    n_keys: int = 9
    n_values: int = 9
    absent: bool = False
    n_train: int = 5_000
    n_validation: int = 500
    n_test: int = 500
    least: ClassVar[Mapping[str, int]] = {"length": 2, "n_keys": 2, "n_values": 2}

    @property
    def alphabet(self) -> Alphabet:
        """Keys, values, question, "absent"; the answers are values, and "absent"."""
        size = self.n_keys + self.n_values + 2
        return Alphabet(size, size, self.n_values + self.absent)

    def check(self) -> None:
        """Require an even length."""
        require_pairs(self.length)

    def draw(self, random: np.random.Generator, n: int) -> Drawn:
        """Draw n samples of length + 2 steps."""
        question = self.n_keys + self.n_values
        keys = random.integers(0, self.n_keys, (n, self.length // 2))
        first = first_alike(keys)
        values = random.integers(self.n_keys, question, keys.shape)
        values = np.take_along_axis(values, first, axis=1)
        rows = np.arange(n)
        if self.absent:
            asked = random.integers(0, self.n_keys, n)
            found = keys == asked[:, None]
            answer = np.where(found.any(1), values[rows, found.argmax(1)], question + 1)
        else:
            pair = one_of(random, first == np.arange(keys.shape[1]))
            asked, answer = keys[rows, pair], values[rows, pair]
        inputs = np.empty((n, self.length + 2), np.int64)
        inputs[:, 0:-2:2], inputs[:, 1:-2:2] = keys, values
        inputs[:, -2], inputs[:, -1] = question, asked
        return Drawn.ending(inputs, answer[:, None])


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

    Source: MAD (Poli and others 2024, arXiv:2403.17844), the first of its six tasks: a vocabulary of 16, a
    length of 128, 12,800 training samples and 1,280 test samples.

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
    least: ClassVar[Mapping[str, int]] = {"length": 4, "n_keys": 2, "n_values": 2}

    @property
    def alphabet(self) -> Alphabet:
        """Keys, values; the answers are values."""
        size = self.n_keys + self.n_values
        return Alphabet(size, size, self.n_values)

    def check(self) -> None:
        """Require an even length."""
        require_pairs(self.length)

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
        n_noise: number of distinct noise tokens.
        noise: probability that noise replaces a pair, in [0, 1).

    Source: MAD (Poli and others, 2024), "noisy in-context recall": as in-context recall, with 16 noise tokens
    and a share of 0.2, and 0.4, 0.6 and 0.8 as harder variants.

    Example:
        >>> task = NoisyRecall(length=10, n_keys=2, noise=0.5, n_train=1, n_validation=1, n_test=1)
        >>> task.split("test").inputs.tolist(), task.split("test").targets[0, -3:].tolist()
        ([[0, 6, 0, 6, 21, 10, 22, 12, 0]], [-100, -100, 6])
    """

    n_noise: int = 16
    noise: float = 0.2

    @property
    def alphabet(self) -> Alphabet:
        """Keys, values, noise; the answers are values."""
        known = super().alphabet
        return known._replace(tokens=known.tokens + self.n_noise)

    def check(self) -> None:
        """Require an even length, and a probability of noise."""
        require_noise(self.noise, self.n_noise)
        super().check()

    def draw(self, random: np.random.Generator, n: int) -> Drawn:
        """Draw n samples of length - 1 steps."""
        # the last pair is the query, and never noise
        noise = np.zeros((n, self.length // 2), np.bool_)
        noise[:, :-1] = noisy(random, n, noise.shape[1] - 1, self.noise)
        return self.with_noise(random, noise)


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

    Source: MAD (Poli and others, 2024), "fuzzy in-context recall": a vocabulary of 16, a length of 128, keys
    and values of at most 3 tokens, 12,800 training samples and 1,280 test samples.

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
    least: ClassVar[Mapping[str, int]] = {"key_size": 1, "value_size": 1}

    @property
    def alphabet(self) -> Alphabet:
        """Key tokens, value tokens, padding; the answers are value tokens."""
        size = self.n_keys + self.n_values
        return Alphabet(size + 1, size, self.n_values)

    def check(self) -> None:
        """Require distinct tokens for the longest key and value, and room for two pairs."""
        at_least(max(2, self.key_size), n_keys=self.n_keys)
        at_least(max(2, self.value_size), n_values=self.n_values)
        if self.length < 2 * self.widest:
            raise ValueError(
                f"`length` must be at least 2 (`key_size` + `value_size`) = {2 * self.widest}, so that a "
                f"pair can occur twice; got {self.length}."
            )

    @property
    def widest(self) -> int:
        """Maximum number of tokens in a pair."""
        return self.key_size + self.value_size

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

    Source: Olsson and others (2022, arXiv:2209.11895); H3 (Fu and others 2023) for the form with one trigger,
    with 20 tokens and a length of 30 in its code; Mamba (Gu and Dao 2023, arXiv:2312.00752, section 4.1.2)
    for training at a length of 256 with 16 symbols, and testing up to 2^20 = 1,048,576.

    Example:
        >>> task = InductionHeads(length=6, n_train=1, n_validation=1, n_test=1)
        >>> task.split("test").inputs.tolist(), task.split("test").targets[0, -1:].tolist()
        ([[16, 9, 10, 14, 13, 2, 16]], [9])
    """

    length: int = 256
    n_symbols: int = 16
    n_copied: int = 1
    fresh: bool = True
    least: ClassVar[Mapping[str, int]] = {"n_symbols": 2, "n_copied": 1}

    @property
    def alphabet(self) -> Alphabet:
        """Symbols, trigger; the answers are symbols."""
        return Alphabet(self.n_symbols + 1, self.n_symbols + 1, self.n_symbols)

    def check(self) -> None:
        """Require room for the first trigger and its symbols."""
        if self.length < 1 + self.n_copied:
            raise ValueError(
                f"`length` must be at least 1 + `n_copied` = {1 + self.n_copied}; got {self.length}. The "
                "first trigger and its symbols come before the second trigger."
            )

    def draw(self, random: np.random.Generator, n: int) -> Drawn:
        """Draw n samples of length + n_copied steps."""
        length, copied = self.length, self.n_copied
        tokens = random.integers(0, self.n_symbols, (n, length + copied))
        place = random.integers(0, length - copied, (n, 1))
        np.put_along_axis(tokens, place, self.n_symbols, axis=1)
        answer = np.take_along_axis(tokens, place + np.arange(1, 1 + copied), axis=1)
        tokens[:, length], tokens[:, length + 1 :] = self.n_symbols, answer[:, :-1]
        return Drawn.ending(tokens, answer)


def require_pairs(length: int) -> None:
    """Raise ValueError if a field `length` is odd."""
    if length % 2:
        raise ValueError(f"`length` must be even, two tokens per pair; got {length}.")
