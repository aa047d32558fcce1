"""Phonebook lookup: find a person's number in a list of names and numbers.

Source: Jelassi and others (2024, arXiv:2402.01032), who evaluate pretrained language models. The names in
this task are invented.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Int64

from linrec.lab.tasks.base import NO_TARGET, require_at_least
from linrec.lab.tasks.drawing import places, without_replacement
from linrec.lab.tasks.synthetic import Drawn, SyntheticTask

__all__ = ["Phonebook"]

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
        fresh: whether every epoch draws new training samples; if not, all epochs share the same samples.

    Source: Jelassi and others (2024): numbers of ten digits that begin with 6 to 9 (any digit in this task,
        so that all digits are equally hard to guess), and two examples of a question and its answer, which
        are unnecessary for a model that is trained on the task.

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

    def __post_init__(self) -> None:
        require_at_least(self, length=1, n_digits=1)
        if not 1 <= self.min_length <= self.length:
            raise ValueError(f"`min_length` must be in 1 .. `length` = {self.length}; got {self.min_length}.")
        if self.length > N_PEOPLE:
            raise ValueError(
                f"`length` must be at most {N_PEOPLE}, the number of distinct names; got {self.length}."
            )
        super().__post_init__()

    @property
    def vocab_size(self) -> int:
        """Vocabulary size: characters and padding."""
        return len(CHARACTERS) + 1

    @property
    def n_outputs(self) -> int:
        """Number of target classes: the digits."""
        return 10

    @property
    def chance(self) -> float:
        """Expected accuracy of a uniform guess among the digits."""
        return 1 / 10

    @staticmethod
    def text(tokens: Int64[np.ndarray, "t"]) -> str:
        """Return a sample as text, without its padding.

        Args:
            tokens: shape (t), int64.
        """
        return "".join(CHARACTERS[token] for token in tokens if token < len(CHARACTERS))

    def at_length(self, length: int) -> "Phonebook":
        """Return the task with the same number of entries in all books.

        Args:
            length: number of entries in every book.
        """
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
