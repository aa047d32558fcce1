import re
from collections import Counter

import pytest

from linrec.lab.tasks import NO_TARGET
from linrec.lab.tasks.lookup import CHARACTERS, FIRST_NAMES, LAST_NAMES, Phonebook
from tests.lab.tasks.recall import FEW

BOOKS = Phonebook(length=6, min_length=2, n_digits=4, **FEW)


def samples(split):
    for inputs, targets, group in zip(
        split.inputs, split.targets.tolist(), split.group.tolist(), strict=True
    ):
        text = Phonebook.text(inputs.numpy())
        # padding is at the end alone
        assert inputs.tolist() == [CHARACTERS.index(character) for character in text] + [39] * (
            len(inputs) - len(text)
        )
        yield text, targets, group


def look_up(text, n_digits):
    """Read the book as a person would."""
    book, question = text.split("\n\n")
    numbers = dict(line.split(": ") for line in book.split("\n"))
    assert len(numbers) == book.count("\n") + 1
    assert all(re.fullmatch(rf"\d{{{n_digits}}}", number) for number in numbers.values())
    name, shown = question.split(": ")
    number = numbers[name]
    assert shown == number[:-1]
    first = len(text) - len(shown) - 1
    return numbers, {first + place: int(digit) for place, digit in enumerate(number)}


def test_a_number_is_that_of_the_person_in_the_book():
    entries = set()
    for text, targets, group in samples(BOOKS.split("test")):
        numbers, answers = look_up(text, 4)
        assert {step: target for step, target in enumerate(targets) if target != NO_TARGET} == answers
        assert set(group) == {len(numbers)}
        assert all(
            first in FIRST_NAMES.split() and last in LAST_NAMES.split()
            for first, last in map(str.split, numbers)
        )
        entries.add(len(numbers))
    assert entries == {2, 3, 4, 5, 6}


def test_every_entry_is_as_likely_to_be_asked_for_and_digits_are_uniform():
    task = Phonebook(length=4, min_length=3, n_digits=1, n_train=2000, n_validation=1, n_test=1)
    asked, digits = Counter(), [0] * 10
    for text, _, _ in samples(task.split("train")):
        numbers, answers = look_up(text, 1)
        asked[len(numbers), list(numbers).index(text.split("\n\n")[1].split(":")[0])] += 1
        digits[next(iter(answers.values()))] += 1
    # half of the books have three entries
    expected = {(entries, place): 1000 / entries for entries in (3, 4) for place in range(entries)}
    assert asked.keys() == expected.keys()
    assert all(abs(asked[kind] - count) < 4 * count**0.5 for kind, count in expected.items())
    assert max(abs(count - 200) for count in digits) < 4 * 200**0.5


def test_names_differ_and_probes_have_one_number_of_entries():
    assert len(set(FIRST_NAMES.split())) == len(set(LAST_NAMES.split())) == 80
    task = Phonebook(length=3, n_digits=2, test_lengths=(12,), **FEW)
    assert all(len(look_up(text, 2)[0]) == 12 for text, _, _ in samples(task.probes["12"]))


def test_books_without_room_or_people_are_refused():
    with pytest.raises(ValueError, match=r"`min_length` must be in 1 \.\. `length` = 20; got 21"):
        Phonebook(min_length=21)
    with pytest.raises(
        ValueError, match="`length` must be at most 6400, the number of distinct names; got 6401"
    ):
        Phonebook(length=6401)
    with pytest.raises(ValueError, match="`length` must be at least 1; got 0"):
        Phonebook(test_lengths=(0,))
    with pytest.raises(ValueError, match="`n_digits` must be at least 1; got 0"):
        Phonebook(n_digits=0)
