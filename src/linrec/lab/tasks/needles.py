"""Tasks of needles: a few sentences hidden in filler text, and a question at the end.

A token is a word, a digit or a punctuation mark. All sentences of the filler have five tokens and share no
word but "the" and "." with the hidden sentences. So samples of any length can be drawn, and the length does
not depend on the hidden sentences.
"""

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from jaxtyping import Int64

from linrec.lab.tasks.drawing import without_replacement
from linrec.lab.tasks.synthetic import Alphabet, Drawn, SyntheticTask

__all__ = ["FactRetrieval", "NeedleTask", "Passkey"]

Filler = Literal["drawn", "repeated"]
Facts = Literal["moves", "directions"]
Tokens = Int64[np.ndarray, "n *t"]

_NOTHING = -1

REPEATED = 5
"""Number of different sentences in repeated filler."""
FILLER_SIZE = 5
"""Number of tokens in a sentence of filler: "the", a noun, a verb, a manner, "."."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NOUNS = _words("""
    river farmer window bridge teacher engine cloud doctor letter forest market kettle
    sailor candle orchard clock painter valley basket tailor lantern meadow pilot drum
""")
VERBS = _words("""
    waits turns sings falls moves sleeps works shines grows stops rests swings drifts wakes runs hums
""")
MANNERS = _words("""
    slowly again outside today quietly alone nearby often gently early somewhere badly late
    inside twice forever
""")
COLOURS = _words("""
    red blue green black white brown pink grey purple orange golden silver scarlet violet amber teal
""")
ROOMS = _words("kitchen garden hallway office bathroom bedroom")
PEOPLE = _words("mary john daniel sandra julie bill fred jeff")
DIRECTIONS = _words("north east south west")
"""Every direction is opposite to the direction two places later."""


class Hidden(NamedTuple):
    """Hidden sentences, questions and answers of n samples.

    Args:
        sentences: tokens of the hidden sentences in their order, (n, sentences, tokens).
        question: tokens of the question, with the correct earlier answers, (n, tokens).
        answers: targets at the last steps, (n, answers).
        told: index of the sentence that tells the answer, (n), int64.
    """

    sentences: Tokens
    question: Tokens
    answers: Tokens
    told: Int64[np.ndarray, "n"]


@dataclass(frozen=True, kw_only=True)
class NeedleTask(SyntheticTask):
    """Base class of tasks with sentences hidden in filler; a subclass defines `words`, `hide` and `alphabet`.

    The hidden sentences are at uniform places between the sentences of the filler. Scores are grouped by the
    tenth of the text that has the sentence that tells the answer, from 0 to 9.

    Args:
        length: maximum number of steps; a sample has as many sentences of filler as fit.
        filler: "drawn" for a random sentence each time, "repeated" for the same five sentences over and over.
        first: whether the hidden sentences come before all filler, so that a model need not detect them.
    """

    length: int = 256
    filler: Filler = "drawn"
    first: bool = False
    fresh: bool = True
    group_name: ClassVar[str] = "tenth"
    words: ClassVar[tuple[str, ...]]
    """The words of the hidden sentences and of the question by their tokens, answers first."""

    def check(self) -> None:
        """Require known filler, and room for a sentence of filler beside the hidden sentences."""
        hidden = self.hide(np.random.default_rng(0), 1)
        least = hidden.sentences[0].size + hidden.question.shape[1] + FILLER_SIZE
        if self.length < least:
            raise ValueError(
                f"`length` must be at least {least}, for the hidden sentences, a sentence of filler and the "
                f"question; got {self.length}."
            )

    @abc.abstractmethod
    def hide(self, random: np.random.Generator, n: int) -> Hidden:
        """Draw the hidden sentences and the questions of n samples."""

    @classmethod
    def vocabulary(cls) -> tuple[str, ...]:
        """Return the words of all tokens."""
        return (*cls.words, *NOUNS, *VERBS, *MANNERS)

    @classmethod
    def text(cls, tokens: Int64[np.ndarray, "t"]) -> str:
        """Return tokens (t) as text."""
        words = cls.vocabulary()
        return " ".join(words[token] for token in tokens)

    def draw(self, random: np.random.Generator, n: int) -> Drawn:
        """Draw n samples of at most `length` steps."""
        sentences, question, answers, told = self.hide(random, n)
        hidden, size = sentences.shape[1:]
        fillers = (self.length - hidden * size - question.shape[1]) // FILLER_SIZE
        if self.first:
            places = np.tile(np.arange(hidden), (n, 1))
        else:
            places = np.sort(without_replacement(random, n, hidden, hidden + fillers), axis=1)
        cells = np.full((n, hidden + fillers, max(size, FILLER_SIZE)), _NOTHING)
        is_filler = np.ones(cells.shape[:2], np.bool_)
        np.put_along_axis(is_filler, places, False, axis=1)
        cells[is_filler, :FILLER_SIZE] = self._fill(random, n, fillers).reshape(-1, FILLER_SIZE)
        cells[~is_filler, :size] = sentences.reshape(-1, size)
        # all samples have the same number of tokens
        text = cells[cells != _NOTHING].reshape(n, -1)
        inputs = np.concatenate([text, question], axis=1)
        tenth = 10 * places[np.arange(n), told] // (hidden + fillers)
        group = np.broadcast_to(tenth[:, None], inputs.shape).copy()
        return Drawn.ending(inputs, answers)._replace(group=group)

    def _fill(self, random: np.random.Generator, n: int, sentences: int) -> Tokens:
        """Return sentences of filler (n, sentences, 5)."""
        kinds, first = (NOUNS, VERBS, MANNERS), len(self.words)
        the, stop = self._token("the"), self._token(".")
        tokens = np.full((n, sentences, FILLER_SIZE), the)
        tokens[..., -1] = stop
        for place, words in enumerate(kinds):
            if self.filler == "drawn":
                chosen = random.integers(0, len(words), (n, sentences))
            else:
                chosen = np.arange(sentences) % REPEATED
            tokens[..., 1 + place] = first + chosen
            first += len(words)
        return tokens

    def _token(self, word: str) -> int:
        return self.words.index(word)

    def _say(self, sentence: str, n: int, **parts: Tokens) -> Tokens:
        """Return a sentence as tokens (n, t): words, and parts by their names, tokens (n) or (n, m)."""
        columns = [
            parts[word].reshape(n, -1) if word in parts else np.full((n, 1), self._token(word))
            for word in sentence.split()
        ]
        return np.concatenate(columns, axis=1)


@dataclass(frozen=True, kw_only=True)
class Passkey(NeedleTask):
    """Recall the digits of a number. A sentence with the number is hidden in filler.

        x = .. the red key is 3 1 4 1 5 . ..   what is the red key ? the red key is 3 1 4 1
        y = 3 1 4 1 5 from the last "is" on

    With several keys, every key has another colour, and the question asks for one of the keys. The inputs
    contain the correct earlier digits. Tokens are the digits, the other words of the sentences, and the words
    of the filler.

    Args:
        n_keys: number of hidden keys, at most 16; more than one is the needle with distractors.
        n_digits: number of digits in a key.

    Source: Mohtashami and Jaggi, Landmark Attention (2023, arXiv:2305.16300), for the passkey, with the same
    five sentences over and over, `filler="repeated"`; Hsieh and others, RULER (2024, arXiv:2404.06654), for
    several keys. Both papers test pretrained language models, with other sentences.

    Example:
        >>> task = Passkey(length=30, n_digits=4, n_train=1, n_validation=1, n_test=1)
        >>> Passkey.text(task.split("test").inputs[0].numpy())
        'the forest rests quietly . the amber key is 7 6 6 1 . what is the amber key ? the amber key is 7 6 6'
    """

    n_keys: int = 1
    n_digits: int = 5
    words: ClassVar[tuple[str, ...]] = (*"0123456789", *COLOURS, *_words("the key is what . ?"))
    least: ClassVar[Mapping[str, int]] = {"n_keys": 1, "n_digits": 1}

    @property
    def alphabet(self) -> Alphabet:
        """All words; the answers are digits."""
        return Alphabet(len(self.vocabulary()), 10, 10)

    def check(self) -> None:
        """Require a colour for every key, and room for the keys."""
        if self.n_keys > len(COLOURS):
            raise ValueError(
                f"`n_keys` must be at most {len(COLOURS)}, the number of colours; got {self.n_keys}."
            )
        super().check()

    def hide(self, random: np.random.Generator, n: int) -> Hidden:
        """Draw keys of different colours, and ask for one of the keys."""
        colours = 10 + without_replacement(random, n, self.n_keys, len(COLOURS))
        digits = random.integers(0, 10, (n, self.n_keys, self.n_digits))
        sentences = [
            self._say("the COLOUR key is DIGITS .", n, COLOUR=colours[:, key], DIGITS=digits[:, key])
            for key in range(self.n_keys)
        ]
        told, rows = random.integers(0, self.n_keys, n), np.arange(n)
        asked, answers = colours[rows, told], digits[rows, told]
        question = self._say(
            "what is the COLOUR key ? the COLOUR key is DIGITS", n, COLOUR=asked, DIGITS=answers[:, :-1]
        )
        return Hidden(np.stack(sentences, axis=1), question, answers, told)


@dataclass(frozen=True, kw_only=True)
class FactRetrieval(NeedleTask):
    """Answer a question about facts that are hidden in filler.

        moves       x = .. mary went to the kitchen . ..   where is mary ?
                    y = kitchen
        directions  x = .. the office is east of the garden . .. the kitchen is north of the office . ..
                        what is the office south of ?
                    y = kitchen

    A person may move several times, and the latest room of a person counts. Directions are two facts about a
    common room, in different directions. Every fact and the question may be said from either side, so a model
    must know which directions are opposite. Tokens are the rooms, the other words of facts and questions, and
    the words of the filler; the answer is a room.

    Args:
        facts: "moves" or "directions".
        n_facts: number of facts; 2 with "directions".

    Source: Bulatov, Kuratov and Burtsev, Scaling Transformer to 1M tokens and beyond with RMT (2023,
    arXiv:2304.11062): memorisation (`first`), detection (the default) and reasoning (two "directions"). Facts
    and questions have the form of bAbI's tasks 1 and 4 (Weston and others 2015, arXiv:1502.05698), with six
    rooms; there, the filler is natural text.

    Example:
        >>> task = FactRetrieval(length=20, n_train=1, n_validation=1, n_test=1)
        >>> test = task.split("test")
        >>> FactRetrieval.text(test.inputs[0].numpy())
        'the bridge works quietly . bill went to the bathroom . the teacher sleeps badly . where is bill ?'
        >>> FactRetrieval.words[test.targets[0, -1]]
        'bathroom'
    """

    facts: Facts = "moves"
    n_facts: int = 1
    words: ClassVar[tuple[str, ...]] = (
        *(*ROOMS, *PEOPLE, *DIRECTIONS),
        *_words("the went to is of where what . ?"),
    )
    least: ClassVar[Mapping[str, int]] = {"n_facts": 1}

    @property
    def alphabet(self) -> Alphabet:
        """All words; the answers are rooms."""
        return Alphabet(len(self.vocabulary()), len(ROOMS), len(ROOMS))

    def check(self) -> None:
        """Require a known kind of facts, two directions, and room for the facts."""
        if self.facts == "directions" and self.n_facts != 2:
            raise ValueError(f"`n_facts` must be 2 with `facts='directions'`; got {self.n_facts}.")
        super().check()

    def hide(self, random: np.random.Generator, n: int) -> Hidden:
        """Draw facts, and ask for a room."""
        return self._moves(random, n) if self.facts == "moves" else self._directions(random, n)

    def _moves(self, random: np.random.Generator, n: int) -> Hidden:
        people = random.integers(0, len(PEOPLE), (n, self.n_facts))
        rooms = random.integers(0, len(ROOMS), (n, self.n_facts))
        rows = np.arange(n)
        asked = people[rows, random.integers(0, self.n_facts, n)]
        # the last fact about the person
        told = self.n_facts - 1 - (people == asked[:, None])[:, ::-1].argmax(1)
        sentences = [
            self._say(
                "PERSON went to the ROOM .", n, PERSON=len(ROOMS) + people[:, fact], ROOM=rooms[:, fact]
            )
            for fact in range(self.n_facts)
        ]
        question = self._say("where is PERSON ?", n, PERSON=len(ROOMS) + asked)
        return Hidden(np.stack(sentences, axis=1), question, rooms[rows, told][:, None], told)

    def _directions(self, random: np.random.Generator, n: int) -> Hidden:
        middle, *others = without_replacement(random, n, 3, len(ROOMS)).T
        # others[i] is in directions[i] of the middle
        directions = without_replacement(random, n, 2, len(DIRECTIONS)).T
        first = len(ROOMS) + len(PEOPLE)
        opposite = first + (directions + 2) % len(DIRECTIONS)
        sentences = []
        for other, direction, turned in zip(others, first + directions, opposite, strict=True):
            from_middle = random.random(n) < 0.5
            sentences.append(
                self._say(
                    "the ROOM is DIRECTION of the FROM .",
                    n,
                    ROOM=np.where(from_middle, middle, other),
                    DIRECTION=np.where(from_middle, turned, direction),
                    FROM=np.where(from_middle, other, middle),
                )
            )
        told, rows = random.integers(0, 2, n), np.arange(n)
        direct = self._say(
            "what is DIRECTION of the ROOM ?", n, DIRECTION=first + directions[told, rows], ROOM=middle
        )
        turned = self._say("what is the ROOM DIRECTION of ?", n, DIRECTION=opposite[told, rows], ROOM=middle)
        question = np.where(random.random((n, 1)) < 0.5, direct, turned)
        return Hidden(np.stack(sentences, axis=1), question, np.stack(others)[told, rows][:, None], told)
