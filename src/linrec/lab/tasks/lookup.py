"""Tasks of lookup: many queries per sample, entries of many tokens, or many writes before a read."""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np
from jaxtyping import Int64

from linrec.lab.tasks.base import NO_TARGET, Split
from linrec.lab.tasks.drawing import places, without_replacement
from linrec.lab.tasks.synthetic import Alphabet, Drawn, SyntheticTask

__all__ = ["MQAR", "FlipFlop", "Phonebook"]

Kind = tuple[int, int]
Filler = Literal["zero", "random"]


@dataclass(frozen=True, kw_only=True)
class MQAR(SyntheticTask):
    """Multi-query associative recall: recall the value of every key when the key occurs again.

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

    Source: Zoology (Arora and others 2024, arXiv:2312.04927), figure 2; mixed lengths as in Based (Arora and
    others 2024, arXiv:2402.18668), figure 2.

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
    least: ClassVar[Mapping[str, int]] = {"n_pairs": 1}

    @property
    def alphabet(self) -> Alphabet:
        """Filler, keys, values, and padding if lengths are mixed; the answers are values."""
        padding = any(length < self.steps for length, _, _ in self.kinds)
        return Alphabet(self.n_tokens + padding, self.n_tokens, self.n_tokens - self.n_tokens // 2)

    def check(self) -> None:
        """Require kinds of samples whose pairs fit, and enough tokens for distinct keys."""
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

    @property
    def kinds(self) -> tuple[tuple[int, int, int], ...]:
        """Kinds of samples as (length, pairs, weight)."""
        return self.mix or ((self.length, self.n_pairs, 1),)

    @property
    def steps(self) -> int:
        """Number of steps in every sample, including padding."""
        return max(length for length, _, _ in self.kinds)

    def at_length(self, length: int) -> "MQAR":
        """Return the task with all samples of the same length, and with `n_pairs` pairs."""
        return self.of_kind(length, self.n_pairs)

    def of_kind(self, length: int, pairs: int) -> "MQAR":
        """Return the task with all samples of the same number of steps and of pairs."""
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


WRITE, READ, IGNORE = 2, 3, 4


@dataclass(frozen=True, kw_only=True)
class FlipFlop(SyntheticTask):
    """Answer each read instruction with the bit of the latest write instruction.

        x = w 0  i 1  r 0  i 0  w 1  i 0  r 1
        y = . .  . .  0 .  . .  . .  . .  1 .

    Every instruction is followed by a bit. The first instruction writes, the last reads. All others ignore
    with probability p, and write or read with probability (1 - p) / 2 each. The bit after a read is the
    latest written bit, and it is the target at the read instruction. All other bits are random and not
    targets.

    Tokens are the bits 0 and 1, and the instructions 2 (write), 3 (read) and 4 (ignore). Scores are grouped
    by the number of instructions since the write. The probes "dense" and "sparse" have other probabilities
    than training.

    Args:
        length: number of tokens; even.
        ignore: probability p of an ignore instruction.
        ignore_dense: probability p in the probe "dense".
        ignore_sparse: probability p in the probe "sparse".

    Source: Liu and others (2023, arXiv:2306.00946), flip-flop language modelling: 256 instructions, trained
    with FFL(0.8), which ignores with probability 0.8, and also tested with FFL(0.98), sparse, and FFL(0.1),
    dense. They train on 1.6 million sequences, and test on 16,000, 160,000 and 4,000 sequences.

    Example:
        >>> task = FlipFlop(length=10, ignore=0.4, n_train=1, n_validation=1, n_test=1)
        >>> task.split("test").inputs.tolist(), task.split("test").targets.tolist()
        ([[2, 0, 2, 1, 2, 1, 4, 0, 3, 1]], [[-100, -100, -100, -100, -100, -100, -100, -100, 1, -100]])
    """

    length: int = 512
    ignore: float = 0.8
    ignore_dense: float = 0.1
    ignore_sparse: float = 0.98
    fresh: bool = True
    group_name: ClassVar[str] = "distance"

    @property
    def alphabet(self) -> Alphabet:
        """Two bits, three instructions; the answers are bits."""
        return Alphabet(5, 2, 2)

    def check(self) -> None:
        """Require pairs of instructions and bits, and probabilities."""
        if self.length < 4 or self.length % 2:
            raise ValueError(
                "`length` must be even and at least 4, because every instruction is followed by a bit; "
                f"got {self.length}."
            )
        for name in ("ignore", "ignore_dense", "ignore_sparse"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"`{name}` must be a probability, in 0 .. 1; got {getattr(self, name)}.")

    @cached_property
    def probes(self) -> Mapping[str, Split]:
        """Additional test samples by name: "dense", "sparse", and the lengths of `test_lengths`."""
        others = {"dense": self.ignore_dense, "sparse": self.ignore_sparse}
        named = {
            name: dataclasses.replace(self, ignore=ignore, test_lengths=()).split("test")
            for name, ignore in others.items()
        }
        return {**named, **super().probes}

    def draw(self, random: np.random.Generator, n: int) -> Drawn:
        """Draw n sequences of length / 2 instructions and bits."""
        pairs = self.length // 2
        # a single random number decides between write, read and ignore
        number = random.random((n, pairs))
        writes = number < (1 - self.ignore) / 2
        reads = (number < 1 - self.ignore) & ~writes
        writes[:, 0], reads[:, 0] = True, False
        writes[:, -1], reads[:, -1] = False, True
        latest = np.maximum.accumulate(np.where(writes, np.arange(pairs), 0), axis=1)
        bits = random.integers(0, 2, (n, pairs))
        bits = np.where(reads, np.take_along_axis(bits, latest, axis=1), bits)

        inputs = np.empty((n, self.length), np.int64)
        inputs[:, ::2] = np.select([writes, reads], [WRITE, READ], IGNORE)
        inputs[:, 1::2] = bits
        targets = np.full((n, self.length), NO_TARGET, np.int64)
        targets[:, ::2] = np.where(reads, bits, NO_TARGET)
        return Drawn(inputs, targets, np.repeat(np.arange(pairs) - latest, 2, axis=1))


CHARACTERS = "0123456789 :\nabcdefghijklmnopqrstuvwxyz"
"""The characters of tokens 0, 1, 2, ..."""

FIRST_NAMES = """
bipara bodrema bofairo brinorn brougal bryglix depoxi dougone drelumi drodris dukin dydaixa
fagloe februmi feogom fisoura fugane futeck fuviano fyteona gliatol glogiso gouweri haireox hazhao heojelo
jejunda jeskye jikuthe jouvum kadome kadrith kamuthe kavon kermyro kiasuma krefuth kriraxi kryrim kukrys
leglomo leodyra logluso loplarn mekiami miwuni myparna nevou noquyro panzon pilnine pitarn pofuth pybixo
pyhish qualyl queolis quomexi rairys rituxo rubole ryhylo ryjul saliarn skethax skysko taifule tedrem thedei
thybroi tobosha tokryri tumyna vakusi vaplin vypurno wopes zekairn zevora zogemi
"""

LAST_NAMES = """
biquourn bislyckby bouthin brefunwyn breonby bryglex daidenby daindbryn delinmor dewuby
doukesmor doziasott draniash dreoker fezith filglilby fousskeox fylirnwyn fyskex gialelby glojolvek gylommor
hanilott hefaish henirurn hyfouckby jalaixask jazhyxvek jobainmor jogonvek kebyrwyn keofoxdle kironmor
kiwaisask kolnomask krasaiurn krykynott kylvemor losaxask lybriack lynockmor malyshurn maspemor moujyck
myrernask najelvek nouthtym nuxskiam palyxby peplomott pevyrvek plibosmor pliwound plytyth punorndle pyrkrolby
quojoxask quozhevek quylurn raipanby roboxask rywyrnwyn saidreth siavythby sihilvek skaisyl skamiwyn tawernvek
thuporurn vefenby vegusvek voulamor vylarott wasvemott wefyrnvek wetermor wulfulask zafounvek zedarn zhipor
"""

N_PEOPLE = len(FIRST_NAMES.split()) * len(LAST_NAMES.split())


@dataclass(frozen=True, kw_only=True)
class Phonebook(SyntheticTask):
    """Look up a person's number in a phonebook.

        x = name_1: number_1 / name_2: number_2 / .. / name_B: number_B / / name_i: number_i
        y = number_i, digit by digit, from the space after the last colon on

    A slash in the formula is a newline. A token is a character, so a model must compare names over many
    steps. People may share a first name or a last name, but no person occurs twice in a book. Digits and
    queries are uniform. Shorter books are padded at the end. Scores are grouped by the number of entries, and
    the books of a probe in `test_lengths` all have the same number of entries.

    Args:
        length: maximum number of entries in a book.
        min_length: minimum number of entries in a book; the number of entries is uniform.
        n_digits: number of digits in a phone number.

    Source: Jelassi and others (2024, arXiv:2402.01032), who evaluate pretrained language models: numbers of
    ten digits that begin with 6 to 9 (any digit in this task, so that all digits are equally hard to guess),
    and two examples of a question and its answer, which are unnecessary for a model that is trained on the
    task. The names in this task are invented.

    Example:
        >>> task = Phonebook(length=2, min_length=2, n_digits=3, n_train=1, n_validation=1, n_test=1)
        >>> print(Phonebook.text(task.split("test").inputs[0].numpy()))
        bipara siavythby: 756
        ryhylo wasvemott: 218
        <BLANKLINE>
        ryhylo wasvemott: 21
    """

    length: int = 20
    min_length: int = 1
    n_digits: int = 10
    fresh: bool = True
    group_name: ClassVar[str] = "entries"
    least: ClassVar[Mapping[str, int]] = {"length": 1, "n_digits": 1}

    @property
    def alphabet(self) -> Alphabet:
        """Characters and padding; the answers are digits."""
        return Alphabet(len(CHARACTERS) + 1, 10, 10)

    def check(self) -> None:
        """Require a range of entries, and enough people for the longest book."""
        if not 1 <= self.min_length <= self.length:
            raise ValueError(f"`min_length` must be in 1 .. `length` = {self.length}; got {self.min_length}.")
        if self.length > N_PEOPLE:
            raise ValueError(
                f"`length` must be at most {N_PEOPLE}, the number of distinct names; got {self.length}."
            )

    @staticmethod
    def text(tokens: Int64[np.ndarray, "t"]) -> str:
        """Return a sample of tokens (t) as text, without its padding."""
        return "".join(CHARACTERS[token] for token in tokens if token < len(CHARACTERS))

    def at_length(self, length: int) -> "Phonebook":
        """Return the task with the same number of entries, `length`, in all books."""
        return dataclasses.replace(self, length=length, min_length=length, test_lengths=())

    def draw(self, random: np.random.Generator, n: int) -> Drawn:
        """Draw n samples, padded to the number of tokens in the longest possible book."""
        entries = random.integers(self.min_length, self.length + 1, (n, 1))
        people = without_replacement(random, n, self.length, N_PEOPLE)
        names, digits = _names(), random.integers(0, 10, (n, self.length, self.n_digits))
        line_end = np.full((n, self.length, 1), CHARACTERS.index("\n"))
        lines = np.concatenate([names[people], digits, line_end], axis=2)
        asked = random.integers(0, entries)[:, 0]
        lines[np.broadcast_to(np.arange(self.length) >= entries, people.shape)] = _NOTHING

        rows = np.arange(n)
        answer = digits[rows, asked]
        cells = [lines.reshape(n, -1), line_end[:, 0], names[people[rows, asked]], answer]
        written = np.concatenate(cells, axis=1)
        kept = written != _NOTHING
        inputs = np.full((n, written.shape[1]), len(CHARACTERS))
        inputs[places(kept)] = written[kept]
        targets = np.full_like(inputs, NO_TARGET)
        # the last digit is only a target
        last = kept.sum(1, keepdims=True) - 1
        np.put_along_axis(inputs, last, len(CHARACTERS), axis=1)
        np.put_along_axis(targets, last + np.arange(-self.n_digits, 0), answer, axis=1)
        return Drawn(inputs[:, :-1].copy(), targets[:, :-1].copy(), np.tile(entries, written.shape[1] - 1))


_NOTHING = -1


@functools.cache
def _names() -> Int64[np.ndarray, "people width"]:
    """Return the text before every person's number as tokens, padded with -1."""
    texts = [f"{first} {last}: " for first in FIRST_NAMES.split() for last in LAST_NAMES.split()]
    tokens = np.full((N_PEOPLE, max(map(len, texts))), _NOTHING)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = [CHARACTERS.index(character) for character in text]
    return tokens
