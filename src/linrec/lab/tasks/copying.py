"""Tasks of copying: keep symbols in the state or in the parameters, and give them back later."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np
from jaxtyping import Int64

from linrec.lab.tasks.base import NO_TARGET
from linrec.lab.tasks.drawing import noisy, require_noise, without_replacement
from linrec.lab.tasks.synthetic import Alphabet, Drawn, SyntheticTask

__all__ = ["Compression", "Copying", "LstmTask2b", "Memorization", "SegmentCopy", "SelectiveCopying"]


@dataclass(frozen=True, kw_only=True)
class Copying(SyntheticTask):
    """Repeat the first symbols of a sequence after a delay.

        x = s_1 ... s_M, blank * length, marker * M
        y = (no target) * (M + length), s_1 ... s_M

    The positions of the symbols are the same in all samples, so a model with fixed transitions can solve the
    task. Tokens are the blank 0, the symbols 1 .. `n_symbols`, and the marker `n_symbols` + 1.

    Args:
        length: number of blanks between the symbols and the markers.
        n_copied: number of symbols to repeat, M.
        n_symbols: number of distinct symbols.
        reverse: whether the symbols are repeated in reverse order.
        fresh: whether every epoch draws new training samples, as in S4's code, which also draws 10,000; if
            not, all epochs share the same samples.

    Source: Arjovsky, Shah and Bengio (2016, arXiv:1511.06464), section 5.1, after Hochreiter and Schmidhuber
    (1997). The layout follows S4's code.

    Example:
        >>> task = Copying(length=3, n_copied=2, n_train=1, n_validation=1, n_test=1)
        >>> task.split("test").inputs.tolist(), task.split("test").targets.tolist()
        ([[2, 7, 0, 0, 0, 9, 9]], [[-100, -100, -100, -100, -100, 2, 7]])
    """

    length: int = 100
    n_copied: int = 10
    n_symbols: int = 8
    reverse: bool = False
    fresh: bool = True
    least: ClassVar[Mapping[str, int]] = {"length": 0, "n_copied": 1, "n_symbols": 2}

    @property
    def alphabet(self) -> Alphabet:
        """Blank, symbols, marker; the answers are symbols."""
        return Alphabet(self.n_symbols + 2, self.n_symbols + 2, self.n_symbols)

    def draw(self, random: np.random.Generator, n: int) -> Drawn:
        """Draw n samples of n_copied + length + n_copied steps."""
        copied, steps = self.n_copied, 2 * self.n_copied + self.length
        symbols = random.integers(1, self.n_symbols + 1, (n, copied))
        inputs = np.zeros((n, steps), np.int64)
        inputs[:, :copied], inputs[:, -copied:] = symbols, self.n_symbols + 1
        return Drawn.ending(inputs, symbols[:, ::-1] if self.reverse else symbols)


@dataclass(frozen=True, kw_only=True)
class SelectiveCopying(SyntheticTask):
    """Repeat the symbols that are scattered among blanks, in their order.

        x = s_1 .. s_M at random positions of the first `length` steps, blanks elsewhere; then marker * M
        y = (no target) * length, s_1 ... s_M

    The state update must depend on the token, so a model with fixed transitions cannot solve the task. Tokens
    are the blank 0, the symbols 1 .. `n_symbols`, and the marker `n_symbols` + 1.

    Args:
        length: number of steps before the markers, including the symbols.
        n_copied: number of symbols to repeat, M.
        n_symbols: number of distinct symbols.
        fresh: whether every epoch draws new training samples, as for Mamba; if not, all epochs share the same
            samples, as in MAD, which has 12,800 training samples and 1,280 test samples.

    Source: Jing and others (Gated Orthogonal Recurrent Units, 2019, arXiv:1706.02761), as the denoise task.
    Mamba (Gu and Dao 2023, arXiv:2312.00752) made it widely known, in section 4.1.1 and figure 2: 4,096
    steps, 16 symbols to copy from an alphabet of 16, and no released code. MAD (Poli and others 2024,
    arXiv:2403.17844) has 256 steps and a vocabulary of 16. The layout follows S4's generator, with a marker
    for each symbol. MAD has a single marker, followed by blanks at the positions of the answers, within its
    256 steps; its code puts no blank after the last symbol.

    Example:
        >>> task = SelectiveCopying(length=6, n_copied=2, n_train=1, n_validation=1, n_test=1)
        >>> task.split("test").inputs.tolist(), task.split("test").targets[0, -2:].tolist()
        ([[0, 6, 0, 0, 12, 0, 15, 15]], [6, 12])
    """

    length: int = 256
    n_copied: int = 16
    n_symbols: int = 14
    least: ClassVar[Mapping[str, int]] = {"n_copied": 1, "n_symbols": 2}

    @property
    def alphabet(self) -> Alphabet:
        """Blank, symbols, marker; the answers are symbols."""
        return Alphabet(self.n_symbols + 2, self.n_symbols + 2, self.n_symbols)

    def check(self) -> None:
        """Require a place for every symbol."""
        if self.length < self.n_copied:
            raise ValueError(
                f"`length` must be at least `n_copied` = {self.n_copied}; got {self.length}. The symbols to "
                "copy have distinct positions: pass a greater length or fewer symbols."
            )

    def draw(self, random: np.random.Generator, n: int) -> Drawn:
        """Draw n samples of length + n_copied steps."""
        copied, steps = self.n_copied, self.length + self.n_copied
        symbols = random.integers(1, self.n_symbols + 1, (n, copied))
        # the positions of the smallest of independent numbers are a uniform choice without repetition
        places = np.argpartition(random.random((n, self.length)), copied - 1, axis=1)[:, :copied]
        inputs = np.zeros((n, steps), np.int64)
        np.put_along_axis(inputs, np.sort(places, axis=1), symbols, axis=1)
        inputs[:, -copied:] = self.n_symbols + 1
        return Drawn.ending(inputs, symbols)


Kind = Literal["copy", "reverse", "associative"]


@dataclass(frozen=True, kw_only=True)
class SegmentCopy(SyntheticTask):
    """Repeat the first symbols of a sequence at its end, across the segments of a model.

        copy         x = s_1 .. s_M, noise * N, marker * M        y = s_1 .. s_M at the markers
        reverse      x = s_1 .. s_M, noise * N, marker * M        y = s_M .. s_1 at the markers
        associative  x = k_1 s_1 .. k_M s_M, noise * N, k'_1 .. k'_M        y = symbol of k'_i

    A model with segments of T steps, T less than N, answers from its memory alone. The keys of a sample are
    distinct, and k' is a random order of them. Tokens are the symbols 0 .. `n_symbols` - 1, the keys, the
    marker, then the noise.

    Args:
        length: number of steps; N is what the other parts leave.
        kind: "copy", "reverse" or "associative".
        n_copied: number of symbols to repeat, M.
        n_symbols: number of distinct symbols.
        n_keys: number of distinct keys, at least M with "associative".
        n_noise: number of distinct noise tokens; with 1, the noise is a blank.

    Source: Bulatov and others, Recurrent Memory Transformer (2022, arXiv:2207.06881): copy, reverse and
    associative retrieval, with sequences that models cut into segments.

    Example:
        >>> task = SegmentCopy(length=6, n_copied=2, n_symbols=9, n_train=1, n_validation=1, n_test=1)
        >>> task.split("test").inputs.tolist(), task.split("test").targets.tolist()
        ([[7, 5, 26, 26, 25, 25]], [[-100, -100, -100, -100, 7, 5]])
    """

    length: int = 72
    kind: Kind = "copy"
    n_copied: int = 6
    n_symbols: int = 8
    n_keys: int = 16
    n_noise: int = 1
    fresh: bool = True
    least: ClassVar[Mapping[str, int]] = {"n_copied": 1, "n_symbols": 2, "n_noise": 1}

    @property
    def alphabet(self) -> Alphabet:
        """Symbols, keys, marker, noise; the answers are symbols."""
        tokens = self.n_symbols + self.n_keys + 1 + self.n_noise
        return Alphabet(tokens, self.n_symbols, self.n_symbols)

    def check(self) -> None:
        """Require a known kind, room for symbols and answers, and enough keys."""
        if self.length < self._given + self.n_copied:
            raise ValueError(
                f"`length` must be at least {self._given + self.n_copied}, so that {self.n_copied} symbols "
                f"and their answers fit; got {self.length}."
            )
        if self.kind == "associative" and self.n_keys < self.n_copied:
            raise ValueError(
                f"`n_keys` must be at least `n_copied` = {self.n_copied}, because keys are distinct; "
                f"got {self.n_keys}."
            )

    @property
    def _given(self) -> int:
        """Steps at the start that the answers depend on."""
        return self.n_copied * (2 if self.kind == "associative" else 1)

    def draw(self, random: np.random.Generator, n: int) -> Drawn:
        """Draw n samples of `length` steps."""
        copied, marker = self.n_copied, self.n_symbols + self.n_keys
        symbols = random.integers(0, self.n_symbols, (n, copied))
        inputs = random.integers(marker + 1, self.vocab_size, (n, self.length))
        if self.kind == "associative":
            keys = self.n_symbols + without_replacement(random, n, copied, self.n_keys)
            inputs[:, 0 : 2 * copied : 2], inputs[:, 1 : 2 * copied : 2] = keys, symbols
            order = without_replacement(random, n, copied, copied)
            inputs[:, -copied:] = np.take_along_axis(keys, order, axis=1)
            return Drawn.ending(inputs, np.take_along_axis(symbols, order, axis=1))
        inputs[:, :copied], inputs[:, -copied:] = symbols, marker
        return Drawn.ending(inputs, symbols[:, ::-1] if self.kind == "reverse" else symbols)


@dataclass(frozen=True, kw_only=True)
class LstmTask2b(SyntheticTask):
    """Recall at the last step which of two symbols came first.

        x = s, a_1, ..., a_{length - 1},   s in {0, 1},   a_i uniform
        y = (no target) * (length - 1), s

    Tokens are 0 and 1 .. `n_symbols`. They correspond to the input vectors of Martin and Cundy: 0 to -e_1,
    and i to e_i, one-hot in `n_symbols` dimensions. Unlike these input vectors, the embeddings of 0 and 1
    need not be opposites. All symbols from 1 on may follow the first symbol.

    With `recurs` False, neither 0 nor 1 occurs again, as in Hochreiter and Schmidhuber. They predict the next
    symbol at every step, but only the last symbol is predictable.

    Args:
        length: number of steps; 1,024, 8,192 or 1,048,576 in Martin and Cundy, 100 in Hochreiter and
            Schmidhuber. Pass fewer samples for long sequences: a sample takes 16 bytes per step.
        n_symbols: number of symbols p; 128 in Martin and Cundy, 100 in Hochreiter and Schmidhuber.
        recurs: whether the symbol 1 may occur again.

    Martin and Cundy train with batches of 8 until 5 batches in a row are all correct: 550 batches at 1,024
    steps.

    Source: Hochreiter and Schmidhuber (1997), experiment 2b; Martin and Cundy (2018, arXiv:1709.04057).

    Example:
        >>> task = LstmTask2b(length=5, n_symbols=9, n_train=1, n_validation=1, n_test=1)
        >>> task.split("test").inputs.tolist(), task.split("test").targets.tolist()
        ([[0, 3, 3, 7, 4]], [[-100, -100, -100, -100, 0]])
    """

    length: int = 1024
    n_train: int = 4000
    n_symbols: int = 128
    recurs: bool = True
    fresh: bool = True
    least: ClassVar[Mapping[str, int]] = {"length": 2, "n_symbols": 2}

    @property
    def alphabet(self) -> Alphabet:
        """All symbols; the answers are the two possible first symbols."""
        return Alphabet(self.n_symbols + 1, 2, 2)

    def draw(self, random: np.random.Generator, n: int) -> Drawn:
        """Draw n samples of `length` steps."""
        inputs = random.integers(1 if self.recurs else 2, self.n_symbols + 1, (n, self.length))
        inputs[:, 0] = random.integers(0, 2, n)
        return Drawn.ending(inputs, inputs[:, :1])


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

    Source: MAD (Poli and others 2024, arXiv:2403.17844), "compression": a vocabulary of 15 symbols and the
    end, strings of 31 symbols and the end, 12,800 training samples and 1,280 test samples. In MAD, a decoder
    (an MLP) receives the output at the last step and a position. In this task, the model itself receives
    positions as tokens.

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
    least: ClassVar[Mapping[str, int]] = {"length": 1, "n_symbols": 2}

    @property
    def alphabet(self) -> Alphabet:
        """Symbols, noise, end, positions; the answers are symbols."""
        tokens = self.n_symbols + self.n_noise + 1 + self.length
        return Alphabet(tokens, self.n_symbols, self.n_symbols)

    def check(self) -> None:
        """Require a probability of noise, and a token for every position of the probes."""
        require_noise(self.noise, self.n_noise)
        for length in self.test_lengths:
            if length > self.length:
                raise ValueError(
                    f"`test_lengths` must be at most `length` = {self.length}, because larger positions have "
                    f"no token; got {length}."
                )

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
        return Drawn.ending(inputs, np.take_along_axis(answers, order, axis=1))


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

    Source: MAD (Poli and others, 2024), "memorization": 127 keys, a length of 32, 256 training samples and
    1,280 test samples.

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
    least: ClassVar[Mapping[str, int]] = {"length": 2, "n_facts": 2}

    @property
    def alphabet(self) -> Alphabet:
        """Keys, blank, noise; classes and answers are values."""
        return Alphabet(self.n_facts + 1 + self.n_noise, self.n_facts, self.n_facts)

    def check(self) -> None:
        """Require an even length, and a probability of noise."""
        if self.length % 2:
            raise ValueError(f"`length` must be even, a blank after every key; got {self.length}.")
        require_noise(self.noise, self.n_noise)

    @cached_property
    def values(self) -> Int64[np.ndarray, "facts"]:
        """The map m: the value of every key, shape (n_facts), int64."""
        return np.random.default_rng([self.seed, self.n_facts]).permutation(self.n_facts)

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
