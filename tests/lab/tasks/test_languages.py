import itertools
import re
from collections import Counter

import numpy as np
import pytest

from linrec.lab.tasks import NO_TARGET
from linrec.lab.tasks.languages import CounterLanguage, Dyck, StringCopy
from tests.lab.tasks.recall import FEW, check_against
from tests.lab.tasks.strings import check, strings

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def copied(task):
    """Look the answer up in the text of a sample; its symbols are letters."""

    def oracle(inputs):
        text = "".join([*LETTERS[: task.n_symbols], "|", "."][token] for token in inputs)
        if task.key == "none":
            string, written = re.fullmatch(r"(\w+)\|(\w*)\.*", text).groups()
            answer, start = string, text.index("|")
        elif task.key == "suffix":
            string, written = re.fullmatch(r"(\w+)\|(\w+)\.*", text).groups()
            key, written = written[: task.n_key], written[task.n_key :]
            start = text.index("|") + task.n_key
        else:
            key, string, written = re.fullmatch(r"(\w+)\|(\w+)\|(\w*)\.*", text).groups()
            assert len(key) == task.n_key
            start = text.rindex("|")
        if task.key != "none":
            after = string.index(key) + task.n_key
            answer = string[after : after + task.n_answers]
            assert len(answer) == task.n_answers
        assert task.min_length <= len(string) <= task.length and written == answer[:-1]
        return {start + place: LETTERS.index(symbol) for place, symbol in enumerate(answer)}

    return oracle


@pytest.mark.parametrize("key", ["none", "suffix", "prefix"])
@pytest.mark.parametrize("n_symbols", [2, 26])
def test_strings_are_copied_and_the_symbols_after_a_key(key, n_symbols):
    # keys of two symbols out of two occur several times
    task = StringCopy(length=14, key=key, n_symbols=n_symbols, n_key=2, test_lengths=(30,), **FEW)
    for split in (task.split("train"), task.split("test")):
        check_against(copied(task), split)
    probe = task.probes["30"]
    check_against(copied(task.at_length(30)), probe)
    assert set(probe.group.unique().tolist()) == {30}


def test_lengths_and_places_of_keys_are_uniform():
    task = StringCopy(length=9, key="suffix", n_key=3, n_answers=4, n_train=6000, n_validation=1, n_test=1)
    train = task.split("train")
    counts = train.group[:, 0].bincount(minlength=10)[8:]
    assert counts.sum() == 6000 and abs(counts[0] - 3000) < 4 * 1500**0.5
    places = Counter()
    for inputs in train.inputs.tolist():
        bar = inputs.index(26)
        text = "".join(LETTERS[token] for token in inputs[:bar])
        key = "".join(LETTERS[token] for token in inputs[bar + 1 : bar + 4])
        places[bar, text.index(key)] += 1
    expected = {(length, place): 3000 / (length - 6) for length in (8, 9) for place in range(length - 6)}
    assert places.keys() == expected.keys()
    # a few keys occur a second time
    assert all(abs(places[kind] - count) < 4 * count**0.5 + 20 for kind, count in expected.items())


def valid_next(prefix, task):
    """The set of valid next symbols, "" for the end, by trying each: opening a.., closing A.."""

    def remains(text):
        if task.shuffled:
            parts = ["".join(re.findall(f"[{kind}{kind.upper()}]", text)) for kind in LETTERS[: task.n_kinds]]
        else:
            parts = [text]
        left = []
        for part in parts:
            before = None
            while part != before:
                before, part = part, re.sub("|".join(f"{k}{k.upper()}" for k in LETTERS), "", part)
            left.append(part)
        return "".join(left)

    def begins(text):
        return all(
            not re.search("[A-Z]", remains(text[:n])) and len(remains(text[:n])) <= (task.depth or 99)
            for n in range(len(text) + 1)
        )

    symbols = LETTERS[: task.n_kinds] + LETTERS[: task.n_kinds].upper()
    found = {symbol for symbol in symbols if begins(prefix + symbol)}
    return found | ({""} if not remains(prefix) else set())


def named(task, number):
    """The set that the docstring gives to a class."""
    kinds = LETTERS[: task.n_kinds]
    if task.shuffled:
        open_kinds = {kind.upper() for place, kind in enumerate(kinds) if number >> place & 1}
        return {*kinds} | (open_kinds or {""})
    if number == 0:
        return {*kinds, ""}
    if number <= task.n_kinds:
        return {*kinds, kinds[number - 1].upper()}
    return {kinds[number - 1 - task.n_kinds].upper()}


def bracketed(task, string):
    return "".join((LETTERS[: task.n_kinds] + LETTERS[: task.n_kinds].upper())[symbol] for symbol in string)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n_kinds": 1},
        {"n_kinds": 3, "depth": 2},
        {"depth": 30},
        {"shuffled": True},
        {"n_kinds": 3, "shuffled": True},
    ],
)
def test_the_class_of_brackets_is_the_set_of_valid_next_symbols(fields):
    task = Dyck(length=20, n_train=30, n_validation=1, n_test=10, **fields)
    classes = range(task.n_outputs)
    assert len({frozenset(named(task, number)) for number in classes}) == task.n_outputs
    seen = set()

    def oracle(string):
        wanted = valid_next(bracketed(task, string), task)
        (number,) = [number for number in classes if named(task, number) == wanted]
        seen.add(number)
        return number

    check(task, oracle)
    if task.depth != 30:
        assert seen == {*classes}
    for string in strings(task, "train"):
        text = bracketed(task, string)
        # every symbol was valid, and so is the end
        assert all(text[n] in valid_next(text[:n], task) for n in range(len(text)))
        assert "" in valid_next(text, task)
    assert {len(string) for string in strings(task, "train")} <= set(range(2, 21, 2))


def test_closings_ask_for_the_kind_of_a_closing_bracket_before_it():
    task = Dyck(length=12, n_kinds=3, ask="closings", **FEW)
    kinds = Dyck(length=12, n_kinds=3, **FEW)
    assert (task.split("test").inputs == kinds.split("test").inputs).all()
    for split in (task.split("train"), task.split("test")):
        for inputs, targets in zip(split.inputs.tolist(), split.targets.tolist(), strict=True):
            text = bracketed(task, [token for token in inputs if token < 6])
            wanted = {n - 1: ord(text[n]) - ord("A") for n in range(len(text)) if text[n].isupper()}
            assert {t: y for t, y in enumerate(targets) if y != NO_TARGET} == wanted


@pytest.mark.parametrize("fields", [{}, {"depth": 2}, {"depth": 1}, {"n_kinds": 3}])
def test_nested_strings_of_brackets_are_counted(fields):
    task = Dyck(length=50, n_validation=1, n_test=1, **fields)
    symbols = LETTERS[: task.n_kinds] + LETTERS[: task.n_kinds].upper()
    for length in range(2, 7 if task.n_kinds == 2 else 5):
        # string by string, symbol by symbol
        found = [""]
        for _ in range(length - length % 2):
            found = [
                text + symbol for text in found for symbol in symbols if symbol in valid_next(text, task)
            ]
        assert task.n_strings(length) == sum("" in valid_next(text, task) for text in found)


@pytest.mark.parametrize("depth", [None, 2])
def test_nested_strings_are_uniform(depth):
    task = Dyck(
        length=6, min_length=6, depth=depth, n_kinds=2, n_train=20_000, n_validation=1, n_test=1, fresh=True
    )
    drawn = Counter(bracketed(task, string) for string in strings(task, "train"))
    # two strings are held out
    expected = 20_000 / (task.n_strings(6) - 2)
    assert len(drawn) == task.n_strings(6) - 2
    assert all(abs(count - expected) < 4.5 * expected**0.5 for count in drawn.values())


def test_shuffled_brackets_cross_and_close_any_open_bracket_alike():
    task = Dyck(length=4, min_length=4, shuffled=True, n_validation=1, n_test=1)
    drawn = Counter(
        bracketed(task, string) for string in task.draw(np.random.default_rng(0), 20_000).inputs.tolist()
    )
    # after two opening brackets of different kinds, both closing brackets are as likely
    crossed, nested = drawn["abAB"] + drawn["baBA"], drawn["abBA"] + drawn["baAB"]
    assert abs(crossed - nested) < 4 * (crossed + nested) ** 0.5 and crossed > 1000


def test_probes_of_brackets_are_longer_and_stay_within_the_depth():
    task = Dyck(length=20, depth=3, test_lengths=(400,), n_train=10, n_validation=20, n_test=10)
    for string in strings(task.at_length(400)):
        heights = list(itertools.accumulate(1 if symbol < 2 else -1 for symbol in string))
        assert len(string) == 400 and min(heights) >= 0 and max(heights) == 3 and heights[-1] == 0
    assert task.probes["400"].inputs.shape == (10, 400)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dense": False}, "`dense` must be True"),
        ({"min_length": 1}, "`min_length` must be at least 2, a pair of brackets; got 1"),
        ({"depth": 0}, "`depth` must be None, or at least 1 without `shuffled`; got 0"),
        ({"depth": 3, "shuffled": True}, "got 3 with `shuffled=True`"),
        ({"ask": "closings", "n_kinds": 1}, "`ask` must be 'sets' with .* got 'closings' with .*`n_kinds=1`"),
        ({"ask": "closings", "shuffled": True}, "`ask` must be 'sets' with `shuffled`"),
        ({"ask": "next"}, "there is no `ask` 'next'; did you mean 'sets'"),
        ({"length": 0}, "`length` must be at least 2; got 0"),
        # of one kind at depth 1 there is a single string of every length
        ({"n_kinds": 1, "depth": 1}, "too few different samples: .*got 1 strings"),
    ],
)
def test_brackets_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Dyck(**fields)


def test_copies_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"at least `n_key` \+ `n_answers` = 9 with a key, .*; got 8"):
        StringCopy(key="prefix", n_answers=6)
    with pytest.raises(ValueError, match="there is no `key` 'infix'; did you mean 'suffix'"):
        StringCopy(key="infix")
    assert StringCopy(n_answers=6).key == "none"


@pytest.mark.parametrize("n_letters", [2, 3, 4])
def test_the_class_of_letters_is_the_set_of_valid_next_letters(n_letters):
    task = CounterLanguage(length=7, n_letters=n_letters, n_words=3, test_lengths=(12,), **FEW)
    letters = LETTERS[:n_letters]
    words = ["".join(letter * n for letter in letters) + "." for n in range(1, 14)]
    sets = [{"a", "b"}, *({letter} for letter in letters[1:]), {"."}]
    assert task.n_outputs == len(sets) and task.chance == 1 / len(sets)
    for split, counts in ((task.split("test"), range(1, 8)), (task.probes["12"], range(8, 13))):
        seen = set()
        for inputs, targets, group in zip(
            split.inputs.tolist(), split.targets.tolist(), split.group.tolist(), strict=True
        ):
            text = "".join((letters + ". ")[token] for token in inputs)
            assert re.fullmatch(r"([a-d]+\.){3} *", text)
            for t, target in enumerate(targets):
                prefix = text[: t + 1].rpartition(".")[2]
                if text[t] in ". ":
                    assert target == NO_TARGET
                    continue
                valid = {word[len(prefix)] for word in words if word.startswith(prefix)}
                assert sets[target] == valid
                word = prefix + text[t + 1 :].partition(".")[0] + "."
                assert word in words and group[t] == len(word) // n_letters
                seen.add(group[t])
        assert seen == {*counts}


def test_counts_are_uniform_and_half_of_the_steps_are_right_by_one_answer():
    task = CounterLanguage(length=10, n_train=5000, n_validation=20, n_test=20)
    inputs = task.split("train").inputs
    first = (inputs == 0).int().cumprod(1).sum(1).bincount(minlength=11)[1:]
    assert (first - 500).abs().max() < 4.5 * 500**0.5
    assert task.trivial_score == pytest.approx(0.5)
    # a probe is a task of greater counts, a curriculum begins with smaller counts
    assert (task.at_length(20).min_length, task.at_length(5).min_length) == (11, 1)
    with pytest.raises(ValueError, match=r"`min_length` must be in 1 \.\. `length` = 10; got 11"):
        CounterLanguage(length=10, min_length=11)
    with pytest.raises(ValueError, match="`test_lengths` must be greater than `length` = 50"):
        CounterLanguage(test_lengths=(50,))
