"""Multi-query associative recall (MQAR): key-value pairs, followed by a query for every key.

Source: Zoology (Arora and others 2024, arXiv:2312.04927); mixed lengths as in Based (Arora and others 2024,
arXiv:2402.18668), figure 2.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, get_args

import numpy as np

from linrec.lab.tasks.base import NO_TARGET, Split, require_at_least
from linrec.lab.tasks.drawing import without_replacement
from linrec.lab.tasks.synthetic import Drawn, SyntheticTask

__all__ = ["MQAR"]

Kind = tuple[int, int]
Filler = Literal["zero", "random"]
FILLERS: tuple[Filler, ...] = get_args(Filler)


@dataclass(frozen=True, kw_only=True)
class MQAR(SyntheticTask):
    """Recall the value of every key when the key occurs again.

        x = k_1 v_1 .. k_K v_K, filler with k_1 .. k_K at even distances g_1 .. g_K from its beginning
        y = v_i at the second k_i

    Keys, values and distances are each distinct. Distances are drawn one by one without replacement, with
    probabilities p(2 i) proportional to (i + 1)^(power - 1), so that most queries come early. Tokens are the
    filler 0, keys from 1 on, values from `n_tokens` / 2 on, and with mixed lengths the padding `n_tokens`.
    Scores are grouped by the number of pairs.

    The defaults are the first setting of Zoology's figure 2; the other settings have length 128 with 8 pairs
    and length 256 with 16 pairs. Based trains on the mix ((64, 4, 5), (128, 8, 1), (256, 16, 1),
    (256, 32, 1), (256, 64, 1)), and tests up to length 1,024 with 256 pairs.

    Args:
        length: number of steps; even. With a `mix`, the longest length in it.
        n_pairs: number of pairs K, at most a quarter of `length`; with a `mix`, used for `test_lengths` only.
        n_tokens: number of keys, values and filler tokens in total.
        power: parameter of the distances' distribution; 1 is uniform, smaller values place queries earlier.
        filler: "zero", or "random" for random tokens other than the keys of the sample. Zoology's code does
            not exclude the keys, so a key may occur again there without being a target.
        mix: kinds of samples as (length, pairs, weight), drawn with probabilities proportional to the weights
            and padded to the longest length, in all splits; an empty mix uses `length` and `n_pairs`.
        test_kinds: (length, pairs) of additional test sets, with names such as "1024x256".

    Raises:
        ValueError: a field is out of range, or too large for the other fields.

    Source: Zoology (Arora and others, 2024), figure 2.

    Example:
        >>> task = MQAR(length=12, n_pairs=2, n_tokens=12, n_train=1, n_validation=1, n_test=1)
        >>> task.split("test").inputs.tolist(), task.split("test").targets[0, 4:].tolist()
        ([[4, 8, 5, 11, 0, 0, 4, 0, 0, 0, 5, 0]], [-100, -100, 8, -100, -100, -100, 11, -100])
    """

    length: int = 64
    n_pairs: int = 4
    n_tokens: int = 8192
    power: float = 0.01
    filler: Filler = "zero"
    mix: tuple[tuple[int, int, int], ...] = ()
    test_kinds: tuple[Kind, ...] = ()
    n_train: int = 100_000
    n_validation: int = 3_000
    n_test: int = 3_000
    group_name: ClassVar[str] = "pairs"

    def __post_init__(self) -> None:
        require_at_least(self, n_pairs=1)
        if self.filler not in FILLERS:
            raise ValueError(f"`filler` must be 'zero' or 'random'; got {self.filler!r}.")
        most = max(pairs for _, pairs, _ in self.kinds)
        if self.n_tokens // 2 - 1 < most:
            raise ValueError(
                f"`n_tokens` must be at least 2 * {most} + 2 = {2 * most + 2}, for {most} distinct keys; "
                f"got {self.n_tokens}."
            )
        for length, pairs, weight in self.kinds:
            if length % 2 or not 4 <= 4 * pairs <= length:
                raise ValueError(
                    f"`length` must be even and at least 4 times the number of pairs, which is at least 1; "
                    f"got {length} steps with {pairs} pairs."
                )
            if weight < 1:
                raise ValueError(f"`mix` must have weights of at least 1; got {weight}.")
        if self.steps != self.length:
            raise ValueError(
                f"`length` must be the longest length in `mix`, {self.steps}; got {self.length}."
            )
        for kind in self.test_kinds:
            self.of_kind(*kind)
        super().__post_init__()

    @property
    def kinds(self) -> tuple[tuple[int, int, int], ...]:
        """Kinds of samples as (length, pairs, weight)."""
        return self.mix or ((self.length, self.n_pairs, 1),)

    @property
    def steps(self) -> int:
        """Number of steps in every sample, including padding."""
        return max(length for length, _, _ in self.kinds)

    @property
    def vocab_size(self) -> int:
        """Vocabulary size: filler, keys, values, and padding if lengths are mixed."""
        return self.n_tokens + any(length < self.steps for length, _, _ in self.kinds)

    @property
    def n_outputs(self) -> int:
        """Number of target classes: all tokens except padding."""
        return self.n_tokens

    @property
    def chance(self) -> float:
        """Expected accuracy of a uniform guess among the values."""
        return 1 / (self.n_tokens - self.n_tokens // 2)

    def at_length(self, length: int) -> "MQAR":
        """Return the task with all samples of the same length, and with `n_pairs` pairs.

        Args:
            length: number of steps.
        """
        return self.of_kind(length, self.n_pairs)

    def of_kind(self, length: int, pairs: int) -> "MQAR":
        """Return the task with all samples of the same kind.

        Args:
            length: number of steps.
            pairs: number of pairs in each sample.
        """
        return dataclasses.replace(self, length=length, n_pairs=pairs, mix=(), test_lengths=(), test_kinds=())

    @cached_property
    def probes(self) -> Mapping[str, Split]:
        """Additional test samples by name, for `test_lengths` and `test_kinds`."""
        kinds = {f"{length}x{pairs}": self.of_kind(length, pairs) for length, pairs in self.test_kinds}
        return {**super().probes, **{name: task.split("test") for name, task in kinds.items()}}

    def draw(self, random: np.random.Generator, n: int) -> Drawn:
        """Draw n samples, padded to the same length."""
        weights = np.array([weight for _, _, weight in self.kinds], np.float64)
        kind = random.choice(len(weights), n, p=weights / weights.sum())
        inputs = np.full((n, self.steps), self.n_tokens)
        targets = np.full_like(inputs, NO_TARGET)
        group = np.empty_like(inputs)
        for number, (length, pairs, _) in enumerate(self.kinds):
            rows = np.flatnonzero(kind == number)
            inputs[rows, :length], targets[rows, :length] = self._of_kind(random, len(rows), length, pairs)
            group[rows] = pairs
        return Drawn(inputs, targets, group)

    def _of_kind(
        self, random: np.random.Generator, n: int, length: int, pairs: int
    ) -> tuple[np.ndarray, np.ndarray]:
        half, shown = self.n_tokens // 2, 2 * pairs
        keys = 1 + without_replacement(random, n, pairs, half - 1)
        values = half + without_replacement(random, n, pairs, self.n_tokens - half)
        slots = (length - shown) // 2
        likely = np.arange(1, slots + 1) ** (self.power - 1.0)
        asked = shown + 2 * without_replacement(random, n, pairs, slots, likely)
        inputs = np.zeros((n, length), np.int64)
        if self.filler == "random":
            inputs[:, shown:] = self._filler(random, keys, length - shown)
        inputs[:, 0:shown:2], inputs[:, 1:shown:2] = keys, values
        np.put_along_axis(inputs, asked, keys, axis=1)
        targets = np.full_like(inputs, NO_TARGET)
        np.put_along_axis(targets, asked, values, axis=1)
        return inputs, targets

    def _filler(self, random: np.random.Generator, keys: np.ndarray, steps: int) -> np.ndarray:
        tokens = random.integers(0, self.n_tokens, (len(keys), steps))
        while True:
            is_key = np.zeros(tokens.shape, np.bool_)
            # key by key, because all keys at once would need much more memory
            for key in keys.T:
                is_key |= tokens == key[:, None]
            if not is_key.any():
                return tokens
            tokens[is_key] = random.integers(0, self.n_tokens, int(is_key.sum()))
