import dataclasses
import itertools
import re
from collections import Counter

import pytest

from linrec.lab.tasks import NO_TARGET
from linrec.lab.tasks.lookup import CHARACTERS, FIRST_NAMES, LAST_NAMES, MQAR, FlipFlop, Phonebook
from tests.lab.tasks.recall import FEW, check_against

BASED = ((16, 2, 5), (32, 4, 1), (32, 8, 1))


def recall(inputs, pairs, n_tokens):
    context, rest = inputs[: 2 * pairs], inputs[2 * pairs :]
    told = dict(zip(context[::2], context[1::2], strict=True))
    assert len(told) == len(set(told.values())) == pairs
    assert all(1 <= key < n_tokens // 2 <= value < n_tokens for key, value in told.items())
    answers = {2 * pairs + place: told[token] for place, token in enumerate(rest) if token in told}
    # every key is asked for once, at an even distance
    assert sorted(answers.values()) == sorted(told.values())
    assert all(step % 2 == 0 for step in answers)
    return answers


@pytest.mark.parametrize("filler", ["zero", "random"])
@pytest.mark.parametrize("n_tokens", [20, 41, 4000])
def test_every_key_is_asked_for_once_and_has_its_value(filler, n_tokens):
    task = MQAR(length=40, n_pairs=8, n_tokens=n_tokens, filler=filler, **FEW)
    test = task.split("test")
    check_against(lambda inputs: recall(inputs, 8, n_tokens), test)
    other = test.inputs[:, 16:][test.targets[:, 16:] == NO_TARGET]
    assert (other == 0).all() == (filler == "zero")
    assert task.chance == 1 / len(range(n_tokens // 2, n_tokens))


def test_tokens_are_uniform_and_distances_follow_the_power_law_without_replacement():
    task = MQAR(length=10, n_pairs=2, n_tokens=30, power=0.2, n_train=20_000, n_validation=1, n_test=1)
    train = task.split("train")
    # keys 1 to 14 and values 15 to 29 are each as likely as another in the first pair and in the second
    for step, (first, n) in enumerate([(1, 14), (15, 15)] * 2):
        counts = train.inputs[:, step].bincount(minlength=30)[first : first + n]
        assert counts.sum() == 20_000 and (counts - 20_000 / n).abs().max() < 4 * (20_000 / n) ** 0.5
    found = Counter()
    for inputs in train.inputs.tolist():
        found[tuple(inputs.index(key, 4) // 2 - 2 for key in inputs[0:4:2])] += 1
    weights = [1, 2**-0.8, 3**-0.8]
    for first, second in itertools.permutations(range(3), 2):
        p = weights[first] / sum(weights) * weights[second] / (sum(weights) - weights[first])
        assert found[first, second] / 20_000 == pytest.approx(p, abs=4 * (p / 20_000) ** 0.5)


def test_mixed_kinds_come_in_proportion_and_are_padded():
    task = MQAR(length=32, mix=BASED, n_tokens=100, n_train=7000, n_validation=5, n_test=60)
    kinds = Counter()
    for name in ("train", "test"):
        split = task.split(name)
        for inputs, targets, group in zip(
            split.inputs.tolist(), split.targets.tolist(), split.group.tolist(), strict=True
        ):
            length = inputs.index(100) if 100 in inputs else 32
            (pairs,) = set(group)
            assert inputs[length:] == [100] * (32 - length)
            asked = {step: target for step, target in enumerate(targets) if target != NO_TARGET}
            assert asked == recall(inputs[:length], pairs, 100)
            kinds[length, pairs] += name == "train"
    expected = {(16, 2): 5000, (32, 4): 1000, (32, 8): 1000}
    assert all(abs(kinds[kind] - count) < 4 * count**0.5 for kind, count in expected.items())
    assert sum(kinds.values()) == 7000
    assert task.vocab_size == 101 and task.n_outputs == 100
    assert MQAR(length=32, n_tokens=100).vocab_size == 100


def test_scores_tell_numbers_of_pairs_apart():
    task = MQAR(length=32, mix=BASED, n_tokens=100, **FEW)
    test = task.split("test")
    # right where there are two pairs alone
    predictions = test.targets.where(test.group == 2, 0)
    scores = task.score(predictions, test)["accuracy_by_pairs"]
    assert [(entry["pairs"], entry["accuracy"]) for entry in scores] == [(2, 1.0), (4, 0.0), (8, 0.0)]


def test_probes_are_of_one_kind_each():
    task = MQAR(length=32, mix=BASED, n_tokens=100, test_lengths=(64,), test_kinds=((64, 16), (24, 6)), **FEW)
    assert list(task.probes) == ["64", "64x16", "24x6"]
    for (name, split), pairs in zip(task.probes.items(), (4, 16, 6), strict=True):
        assert split.inputs.shape == (60, int(name.split("x")[0]))
        check_against(lambda inputs, pairs=pairs: recall(inputs, pairs, 100), split)
    assert dataclasses.replace(task, test_kinds=()).probes.keys() == {"64"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"length": 15},
            "`length` must be even and at least 4 times the number of pairs, which is at least 1; got 15",
        ),
        ({"n_pairs": 17}, "got 64 steps with 17 pairs"),
        ({"test_kinds": ((64, 0),)}, "`n_pairs` must be at least 1; got 0"),
        ({"n_pairs": 0}, "`n_pairs` must be at least 1; got 0"),
        (
            {"n_tokens": 9},
            "`n_tokens` must be at least 2 . 4 \\+ 2 = 10, for 4 distinct keys; got 9",
        ),
        ({"mix": BASED}, "`length` must be the longest length in `mix`, 32; got 64"),
        ({"mix": ((64, 4, 0),)}, "`mix` must have weights of at least 1; got 0"),
        ({"filler": "noise"}, "no `filler` 'noise'; did you mean"),
    ],
)
def test_kinds_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        MQAR(**fields)


FEW_BITS = {"n_train": 20, "n_validation": 5, "n_test": 50}


def pairs(split):
    """Instruction letters and bits of every sample."""
    for row in split.inputs.tolist():
        yield ["01wri"[token] for token in row[::2]], row[1::2]


def test_reads_have_the_bit_written_last_and_are_asked_for_it_beforehand():
    task = FlipFlop(length=40, ignore=0.5, test_lengths=(80,), **FEW_BITS)
    for name, split in {"test": task.split("test"), **task.probes}.items():
        assert split.inputs.shape == (50, 80 if name == "80" else 40)
        groups = iter(split.group.tolist())
        for (instructions, bits), targets in zip(pairs(split), split.targets.tolist(), strict=True):
            assert instructions[0] == "w" and instructions[-1] == "r"
            assert set(instructions) <= set("wri") and set(bits) <= {0, 1}
            group, wanted, memory, age = next(groups), [], None, 0
            for instruction, bit in zip(instructions, bits, strict=True):
                memory, age = (bit, 0) if instruction == "w" else (memory, age + 1)
                if instruction == "r":
                    assert bit == memory and group[len(wanted)] == age
                wanted += [memory if instruction == "r" else -100, -100]
            assert targets == wanted


def test_instructions_have_the_published_frequencies():
    task = FlipFlop(**FEW_BITS)
    assert list(task.probes) == ["dense", "sparse"]
    for split, ignore in (
        (task.split("test"), 0.8),
        (task.probes["dense"], 0.1),
        (task.probes["sparse"], 0.98),
    ):
        assert split.inputs.shape == (50, 512)
        # the first and the last are given
        drawn = [letter for instructions, _ in pairs(split) for letter in instructions[1:-1]]
        for letter, p in {"i": ignore, "w": (1 - ignore) / 2, "r": (1 - ignore) / 2}.items():
            off = 4 * (p * (1 - p) / len(drawn)) ** 0.5
            assert drawn.count(letter) / len(drawn) == pytest.approx(p, abs=off)
        bits = [
            bit
            for letters, row in pairs(split)
            for letter, bit in zip(letters, row, strict=True)
            if letter != "r"
        ]
        assert sum(bits) / len(bits) == pytest.approx(0.5, abs=2 / len(bits) ** 0.5)
        # none depends on the one before
        changes = [one != other for one, other in itertools.pairwise(bits)]
        assert sum(changes) / len(changes) == pytest.approx(0.5, abs=2 / len(changes) ** 0.5)
    assert task.chance == 0.5
    assert task.trivial_score == pytest.approx(0.5, abs=0.15)


def test_fields_out_of_range_are_refused():
    for length in (2, 7):
        with pytest.raises(ValueError, match=f"`length` must be even and at least 4.*got {length}"):
            FlipFlop(length=length)
    for field in ("ignore", "ignore_dense", "ignore_sparse"):
        with pytest.raises(ValueError, match=f"`{field}` must be a probability, in 0 .. 1; got 1.5"):
            FlipFlop(**{field: 1.5})


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
