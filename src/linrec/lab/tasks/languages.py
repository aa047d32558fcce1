"""Tasks of formal languages: copies of strings, nested and shuffled brackets, and equal counts of letters.

The protocol of strings and splits is that of `automata.py`. The literature asks at every step for the set
of all valid next symbols, and a string counts as right if all its sets are (Gers and Schmidhuber 2001;
Suzgun and others 2019, arXiv:1911.03329; Bhattamishra and others 2020, arXiv:2009.11264). It has an output
with a threshold for every symbol. Here every possible set is a class, so "accuracy" is the fraction of
correct sets, and "exact" the fraction of samples with correct sets only.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np
from jaxtyping import Float, Int64

from linrec.lab.tasks.automata import Lengths, StateTracking, Steps, StringTask
from linrec.lab.tasks.base import NO_TARGET
from linrec.lab.tasks.drawing import places
from linrec.lab.tasks.synthetic import Alphabet, Drawn, SyntheticTask, require_longer_probes

__all__ = ["CounterLanguage", "Dyck", "StringCopy"]

Key = Literal["none", "suffix", "prefix"]
Asked = Literal["sets", "closings"]

_NOTHING = -1


@dataclass(frozen=True, kw_only=True)
class StringCopy(StringTask):
    """Copy a string, or the symbols of the string that follow a key.

        none    x = s_1 .. s_L | s_1 .. s_{L-1}             y = s_1 .. s_L from the bar on
        suffix  x = s_1 .. s_L | k_1 .. k_n a_1 .. a_{m-1}  y = a_1 .. a_m from k_n on
        prefix  x = k_1 .. k_n | s_1 .. s_L | a_1 .. a_{m-1}  y = a_1 .. a_m from the second bar on

    The key k is a part of the string at a uniform position, and a are the symbols after the first occurrence
    of the key. The inputs contain the correct earlier answers. A state of fixed size cannot copy long
    strings; a key that comes first tells the state which symbols to keep. Tokens are the symbols 0 ..
    `n_symbols` - 1, the bar |, and the padding after shorter strings. Scores are grouped by the length L.

    Args:
        n_symbols: number of distinct symbols.
        key: "none" to copy the whole string; "suffix" for a key after the string, "prefix" for a key before.
        n_key: number of symbols n in a key.
        n_answers: number of symbols m after the key to recall.

    Source: Jelassi and others (2024, arXiv:2402.01032), section 3, and the n-gram lookup of the released
    code, whose lengths are the defaults. The code packs several strings into a context, and has the end of
    the string as a further target.

    Example:
        >>> task = StringCopy(length=3, min_length=3, n_train=1, n_validation=1, n_test=1)
        >>> task.split("test").inputs.tolist(), task.split("test").targets.tolist()
        ([[9, 11, 13, 26, 9, 11]], [[-100, -100, -100, 9, 11, 13]])
    """

    length: int = 50
    min_length: int = 8
    n_symbols: int = 26
    key: Key = "none"
    n_key: int = 3
    n_answers: int = 4
    least: ClassVar[Mapping[str, int]] = {"length": 1, "n_symbols": 2, "n_key": 1, "n_answers": 1}

    @property
    def alphabet(self) -> Alphabet:
        """Symbols, bar, padding; the answers are symbols."""
        return Alphabet(self.n_symbols + 2, self.n_symbols, self.n_symbols)

    def check(self) -> None:
        """Require a known kind of key, and strings with room for the key and the answers."""
        if self.key != "none" and self.min_length < self.n_key + self.n_answers:
            raise ValueError(
                f"`min_length` must be at least `n_key` + `n_answers` = {self.n_key + self.n_answers} with a "
                f"key, because the answers follow the key in the string; got {self.min_length}."
            )
        super().check()

    def draw_from(self, random: np.random.Generator, n: int, shortest: int) -> Drawn:
        """Draw n samples of uniformly distributed lengths from `shortest` to `length`."""
        lengths = random.integers(shortest, self.length + 1, (n, 1))
        symbols = random.integers(0, self.n_symbols, (n, self.length))
        string = np.where(np.arange(self.length) < lengths, symbols, _NOTHING)
        bar = np.full((n, 1), self.n_symbols)
        if self.key == "none":
            before, answer = [string, bar], string
        else:
            key, answer = self._looked_up(random, string, lengths)
            before = [string, bar, key] if self.key == "suffix" else [key, bar, string, bar]
        written = np.concatenate([*before, answer], axis=1)
        kept = written != _NOTHING
        asked = np.arange(written.shape[1]) >= written.shape[1] - answer.shape[1]
        inputs = np.full_like(written, self.n_symbols + 1)
        targets = np.full_like(written, NO_TARGET)
        inputs[places(kept)] = written[kept]
        targets[places(kept)] = np.where(asked, written, NO_TARGET)[kept]
        # the last answer is only a target
        np.put_along_axis(inputs, kept.sum(1, keepdims=True) - 1, self.n_symbols + 1, axis=1)
        steps = written.shape[1] - 1
        return Drawn(inputs[:, :-1].copy(), targets[:, 1:].copy(), np.tile(lengths, steps))

    def _looked_up(self, random: np.random.Generator, string: Steps, lengths: Steps) -> tuple[Steps, Steps]:
        """Draw keys from strings, and return them with the symbols after their first occurrence."""
        start = random.integers(0, lengths - self.n_key - self.n_answers + 1)
        key = np.take_along_axis(string, start + np.arange(self.n_key), axis=1)
        windows = np.lib.stride_tricks.sliding_window_view(string, self.n_key, axis=1)
        first = (windows == key[:, None]).all(2).argmax(1)[:, None]
        after = first + self.n_key + np.arange(self.n_answers)
        return key, np.take_along_axis(string, after, axis=1)


@dataclass(frozen=True, kw_only=True)
class Dyck(StateTracking):
    """Predict the symbols that may follow, in strings of brackets that close in order.

        x = ( [ ] ( ) ) [ ]
        y = the set of symbols that may follow: all opening brackets unless the depth is reached; the closing
            bracket of the bracket opened last; and the end where no bracket is open

    Nested strings are uniform among the strings of their length. Lengths are even: an odd length is reduced
    by 1. With `shuffled`, brackets of different kinds may cross, so that a counter for each kind suffices: a
    closing bracket closes any open bracket, each equally likely, and the set has the closing brackets of all
    open kinds. With one kind, the two are the same language.

    Tokens are the opening brackets 0 .. k - 1, the closing brackets k .. 2 k - 1, and the padding. Classes of
    nested strings are 0 with no open bracket, 1 + i with a bracket of kind i opened last, and 1 + k + i for
    the same at the maximum depth. The class of shuffled strings is the sum of 2^i over the open kinds.

    With `ask="closings"`, targets are only before closing brackets: the kind of the closing bracket.

    Args:
        length: maximum number of symbols in a string.
        min_length: minimum number of symbols in a string, at least 2; lengths are uniform.
        n_kinds: number of kinds of brackets, k.
        depth: maximum number of open brackets; None is no limit.
        shuffled: whether brackets of different kinds may cross; then there is no limit of the depth.
        ask: "sets" for the set at every step, "closings" for kinds of closing brackets.

    Source: Suzgun and others (2019, arXiv:1911.03329) and Bhattamishra and others (2020, arXiv:2009.11264)
    for Dyck-k and Shuffle-k, trained on up to 50 symbols and tested on up to 150; Hewitt and others (2020,
    arXiv:2010.07515) for the depth limit and for "closings": a model is right if 80% of the probability of
    all closing brackets is on the right bracket. Their strings come from random grammars or automata.

    Example:
        >>> task = Dyck(length=8, min_length=8, n_train=1, n_validation=1, n_test=1)
        >>> task.split("test").inputs.tolist(), task.split("test").targets.tolist()
        ([[0, 1, 0, 1, 3, 2, 3, 2]], [[1, 2, 1, 2, 1, 2, 1, 0]])
    """

    length: int = 50
    min_length: int | None = 2
    dense: bool = True
    n_kinds: int = 2
    depth: int | None = None
    shuffled: bool = False
    ask: Asked = "sets"
    least: ClassVar[Mapping[str, int]] = {"length": 2, "n_kinds": 1}

    @property
    def alphabet(self) -> Alphabet:
        """Brackets, padding; the answers are sets, or kinds."""
        if self.ask == "closings":
            answers = self.n_kinds
        elif self.shuffled:
            answers = 2**self.n_kinds
        else:
            answers = 1 + self.n_kinds * (1 if self.depth is None else 2)
        return Alphabet(2 * self.n_kinds + 1, answers, answers)

    def check(self) -> None:
        """Require targets at all steps, room for a pair of brackets, and fields that fit."""
        if not self.dense:
            raise ValueError("`dense` must be True: at the end of a string, no bracket is open.")
        if self.shortest < 2:
            raise ValueError(f"`min_length` must be at least 2, a pair of brackets; got {self.min_length}.")
        if self.depth is not None and (self.depth < 1 or self.shuffled):
            raise ValueError(
                f"`depth` must be None, or at least 1 without `shuffled`; got {self.depth} with "
                f"`shuffled={self.shuffled}`."
            )
        if self.ask == "closings" and (self.shuffled or self.n_kinds < 2):
            raise ValueError(
                "`ask` must be 'sets' with `shuffled` or a single kind: only nested brackets of at least 2 "
                f"kinds determine the kind; got 'closings' with `shuffled={self.shuffled}` and `n_kinds="
                f"{self.n_kinds}`."
            )
        super().check()

    def existing(self, lengths: Lengths) -> Lengths:
        """Return the lengths, reduced to even lengths."""
        return lengths - lengths % 2

    def n_strings(self, length: int) -> int:
        """Return the number of nested strings of a length, after `existing` has reduced the length."""
        pairs = length // 2
        if self.depth is None or self.depth >= pairs:
            return math.comb(2 * pairs, pairs) // (pairs + 1) * self.n_kinds**pairs
        ways = [1] + [0] * (self.depth + 1)
        for _ in range(2 * pairs):
            # the last entry is beyond the maximum depth, and the entry before the first is also this one
            ways = [ways[d - 1] + ways[d + 1] for d in range(self.depth + 1)] + [0]
        return ways[0] * self.n_kinds**pairs

    def strings(self, random: np.random.Generator, lengths: Lengths) -> tuple[Steps, Steps]:
        """Draw brackets; the answer at a step is the class of the set, or the kind of the next closing."""
        n, kinds, rows = len(lengths), self.n_kinds, np.arange(len(lengths))
        symbols = np.zeros((n, self.length), np.int64)
        answers = np.full((n, self.length), NO_TARGET)
        opening = self._opening
        limit = opening.shape[1] - 1
        depth, open_kinds = np.zeros(n, np.int64), np.zeros((n, limit + 1), np.int64)
        for t in range(self.length):
            live = t < lengths
            opens = random.random(n) < opening[np.maximum(lengths - t, 0), depth]
            last = np.maximum(depth - 1, 0)
            closed = random.integers(0, last + 1) if self.shuffled else last
            new, old = random.integers(0, kinds, n), open_kinds[rows, closed]
            symbols[:, t] = np.where(live, np.where(opens, new, kinds + old), 0)
            # the bracket opened last takes the place of the closed bracket
            into = np.where(opens, depth, closed)
            open_kinds[rows, into] = np.where(opens, new, open_kinds[rows, last])
            depth = np.where(live, depth + np.where(opens, 1, -1), 0)
            top = open_kinds[rows, np.maximum(depth - 1, 0)]
            if self.shuffled:
                is_open = np.arange(limit + 1) < depth[:, None]
                answers[:, t] = sum(
                    (is_open & (open_kinds == kind)).any(1) * 2**kind for kind in range(kinds)
                )
            else:
                full = kinds * (self.depth is not None) * (depth == self.depth)
                answers[:, t] = np.where(depth == 0, 0, 1 + full + top)
        if self.ask == "closings":
            answers[:, -1] = NO_TARGET
            answers[:, :-1] = np.where(symbols[:, 1:] >= kinds, symbols[:, 1:] - kinds, NO_TARGET)
        return symbols, answers

    @cached_property
    def _opening(self) -> Float[np.ndarray, "remaining depth"]:
        """Return the probability of an opening bracket, by the number of remaining steps and the depth."""
        limit = self.length // 2 if self.depth is None else min(self.depth, self.length // 2)
        opening = np.zeros((self.length + 1, limit + 1))
        # numbers of ways to close all brackets in the remaining steps, up to a factor
        ways = np.zeros(limit + 1)
        ways[0] = 1
        for remaining in range(1, self.length + 1):
            if_opened, if_closed = np.append(ways[1:], 0), np.append(0, ways[:-1])
            ways = if_opened + if_closed
            np.divide(if_opened, ways, out=opening[remaining], where=ways > 0)
            ways /= ways.max()
        return opening


@dataclass(frozen=True, kw_only=True)
class CounterLanguage(SyntheticTask):
    """Predict which symbols may follow, in words with equal numbers of letters.

        x = a^n b^n . a^m b^m . ..                    with 2 letters
        x = a^n b^n c^n . a^m b^m c^m . ..            with 3 letters
        y = {a, b} after a; {b} after b, if fewer b than a were read; else {c} or the end {.}

    A sample has several words, because there is a single word for every n, which is uniform. A model must
    count, and start again after every end. Tokens are the letters, the end, and the padding after the last
    word. Classes are 0 for {a, b}, then the sets of a single letter, b first, then the end. There is no
    target at an end, which always precedes a.

    Scores are grouped by n. In a probe, all words are longer than in training.

    Args:
        length: maximum number n of each letter.
        min_length: minimum number n of each letter.
        n_letters: number of distinct letters.
        n_words: number of words in a sample.

    Source: Gers and Schmidhuber (2001); Suzgun and others (2019, arXiv:1906.03648) and Bhattamishra and
    others (2020, arXiv:2009.11264) for two to four letters, n of 1 to 50 in training, and 51 to 100 in
    testing. They have one word per sample, so that all training samples are seen many times.

    Example:
        >>> task = CounterLanguage(length=3, n_words=2, n_train=1, n_validation=1, n_test=1)
        >>> task.split("test").inputs.tolist(), task.split("test").targets[0, :7].tolist()
        ([[0, 0, 1, 1, 2, 0, 0, 0, 1, 1, 1, 2, 3, 3]], [0, 0, 1, 2, -100, 0, 0])
    """

    length: int = 50
    min_length: int = 1
    n_letters: int = 2
    n_words: int = 4
    fresh: bool = True
    group_name: ClassVar[str] = "count"
    least: ClassVar[Mapping[str, int]] = {"n_letters": 2, "n_words": 1}

    @property
    def alphabet(self) -> Alphabet:
        """Letters, end, padding; the answers are the sets of next symbols."""
        return Alphabet(self.n_letters + 2, self.n_letters + 1, self.n_letters + 1)

    def check(self) -> None:
        """Require a range of counts, and longer probes."""
        if not 1 <= self.min_length <= self.length:
            raise ValueError(f"`min_length` must be in 1 .. `length` = {self.length}; got {self.min_length}.")
        require_longer_probes(self)

    def at_length(self, length: int) -> "CounterLanguage":
        """Return the task with another maximum count; if it is greater, all counts exceed the old maximum."""
        least = self.length + 1 if length > self.length else min(self.min_length, length)
        return dataclasses.replace(self, length=length, min_length=least, test_lengths=())

    def draw(self, random: np.random.Generator, n: int) -> Drawn:
        """Draw n samples of `n_words` words, padded to the number of steps of the longest words."""
        letters = self.n_letters
        counts = random.integers(self.min_length, self.length + 1, (n, self.n_words))
        steps = self.n_words * (letters * self.length + 1)
        # a block of every letter and of the end, word by word, and the block of padding
        sizes = np.repeat(counts[:, :, None], letters + 1, axis=2)
        sizes[:, :, -1] = 1
        sizes = sizes.reshape(n, -1)
        sizes = np.append(sizes, steps - sizes.sum(1, keepdims=True), axis=1)
        blocks = np.append(np.tile(np.arange(letters + 1), self.n_words), letters + 1)
        group = np.append(np.repeat(counts, letters + 1, axis=1), np.zeros((n, 1), np.int64), axis=1)

        def written(values: Int64[np.ndarray, "n blocks"]) -> Steps:
            return np.repeat(values.ravel(), sizes.ravel()).reshape(n, steps)

        inputs = written(np.broadcast_to(blocks, sizes.shape))
        following = np.append(inputs[:, 1:], inputs[:, -1:], axis=1)
        # words are valid, so the next symbol is the only valid symbol, except after the first letter
        targets = np.where(inputs == 0, 0, np.where(inputs < letters, following, NO_TARGET))
        return Drawn(inputs, targets, written(group))
