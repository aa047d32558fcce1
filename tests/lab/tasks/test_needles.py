import re
from collections import Counter

import pytest

from linrec.lab.tasks import NO_TARGET
from linrec.lab.tasks.needles import DIRECTIONS, MANNERS, NOUNS, ROOMS, VERBS, FactRetrieval, Passkey
from tests.lab.tasks.recall import FEW

FILLER = re.compile(f"the ({'|'.join(NOUNS)}) ({'|'.join(VERBS)}) ({'|'.join(MANNERS)})")


def samples(task, split):
    """Every sample as hidden sentences with their places among all sentences, question, answers, tenth."""
    for inputs, targets, group in zip(
        split.inputs, split.targets.tolist(), split.group.tolist(), strict=True
    ):
        text, _, question = task.text(inputs.numpy()).rpartition(" . ")
        sentences = text.split(" . ")
        hidden = {place: line for place, line in enumerate(sentences) if not FILLER.fullmatch(line)}
        filler = [line for line in sentences if FILLER.fullmatch(line)]
        if task.filler == "repeated":
            assert filler == [filler[n % 5] for n in range(len(filler))]
        n = sum(target != NO_TARGET for target in targets)
        assert targets[:-n] == [NO_TARGET] * (len(targets) - n)
        answers = [task.words[target] for target in targets[-n:]]
        assert len(set(group)) == 1
        yield hidden, len(sentences), question, answers, group[0]


def look_up(task, split):
    """Compare digits with the key that the question names; return the places and the numbers of keys."""
    found = []
    for hidden, n, question, answers, tenth in samples(task, split):
        keys = {}
        for place, line in hidden.items():
            colour, digits = re.fullmatch(r"the (\w+) key is ((?:\d ?)+)", line).groups()
            assert colour not in keys
            keys[colour] = digits.split(), place
        asked = re.fullmatch(r"what is the (\w+) key \? the \1 key is ?((?:\d ?)*)", question)
        digits, place = keys[asked[1]]
        assert answers == digits and asked[2].split() == digits[:-1]
        assert len(keys) == task.n_keys and len(digits) == task.n_digits and tenth == 10 * place // n
        found.append((place, n))
    return found


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"filler": "repeated"},
        {"n_keys": 4, "n_digits": 2},
        {"n_keys": 16, "n_digits": 1},
        {"first": True},
    ],
)
def test_the_key_that_the_question_names_is_given_digit_by_digit(fields):
    task = Passkey(length=200, test_lengths=(700,), **fields, **FEW)
    places = {place for name in ("train", "test") for place, _ in look_up(task, task.split(name))}
    assert places == {0} if task.first else max(places) > 10
    steps = task.split("test").inputs.shape[1]
    assert 195 < steps <= 200
    probe = task.probes["700"]
    assert 695 < probe.inputs.shape[1] <= 700 and look_up(task, probe)


def test_keys_are_at_uniform_places_of_new_filler_and_digits_are_uniform():
    task = Passkey(length=62, n_digits=1, n_train=4000, n_validation=1, n_test=1)
    train = task.split("train")
    places = Counter(look_up(task, train))
    assert set(places) == {(place, 10) for place in range(10)}
    assert all(abs(count - 400) < 4 * 400**0.5 for count in places.values())
    digits = train.targets[:, -1].bincount(minlength=10)
    assert digits.sum() == 4000 and (digits - 400).abs().max() < 4 * 400**0.5
    text = " ".join(task.text(row.numpy()) for row in train.inputs)
    # nine sentences of filler in each sample
    for words in (NOUNS, VERBS, MANNERS):
        for word in words:
            expected = 36_000 / len(words)
            assert abs(len(re.findall(rf"\b{word}\b", text)) - expected) < 4.5 * expected**0.5


@pytest.mark.parametrize("kind", [Passkey, FactRetrieval])
def test_words_of_the_filler_are_not_words_of_facts(kind):
    words = kind.vocabulary()
    assert len(set(words)) == len(words) == kind().vocab_size


@pytest.mark.parametrize("n_facts", [1, 6])
@pytest.mark.parametrize("first", [False, True])
def test_the_answer_is_the_latest_place_of_the_person(n_facts, first):
    task = FactRetrieval(length=150, n_facts=n_facts, first=first, n_train=300, n_validation=5, n_test=60)
    again = 0
    for name in ("train", "test"):
        for hidden, n, question, answers, tenth in samples(task, task.split(name)):
            where = {}
            moves = [re.fullmatch(r"(\w+) went to the (\w+)", line).groups() for line in hidden.values()]
            for place, (person, room) in zip(hidden, moves, strict=True):
                where[person] = room, 10 * place // n
            asked = re.fullmatch(r"where is (\w+) \?", question)[1]
            assert (answers[0], tenth) == where[asked] and len(answers) == 1
            assert len(moves) == n_facts
            assert not first or [*hidden] == [*range(n_facts)]
            again += len({room for person, room in moves if person == asked}) > 1
    assert again > 20 or n_facts == 1


def test_directions_are_followed_from_either_side():
    task = FactRetrieval(facts="directions", n_facts=2, length=100, n_train=600, n_validation=5, n_test=60)
    forms = Counter()
    for name in ("train", "test"):
        for hidden, n, question, answers, tenth in samples(task, task.split(name)):
            of, told = {}, {}
            for place, line in hidden.items():
                room, direction, other = re.fullmatch(r"the (\w+) is (\w+) of the (\w+)", line).groups()
                back = DIRECTIONS[DIRECTIONS.index(direction) - 2]
                assert (direction, other) not in of and (back, room) not in of
                of[direction, other], of[back, room] = room, other
                told[frozenset((room, other))] = 10 * place // n, direction
            if direct := re.fullmatch(r"what is (\w+) of the (\w+) \?", question):
                direction, room = direct.groups()
            else:
                room, direction = re.fullmatch(r"what is the (\w+) (\w+) of \?", question).groups()
                direction = DIRECTIONS[DIRECTIONS.index(direction) - 2]
            assert answers == [of[direction, room]] and len(hidden) == 2
            # the room is the one of both facts
            (middle,) = frozenset.intersection(*told)
            assert middle == room
            fact = told[frozenset((room, answers[0]))]
            assert tenth == fact[0]
            forms[direct is not None, fact[1] == direction] += 1
    assert sum(forms.values()) == 660
    assert all(abs(count - 165) < 4 * 165**0.5 for count in forms.values()) and len(forms) == 4


def test_opposite_directions_are_those_of_the_compass():
    assert [(a, DIRECTIONS[n - 2]) for n, a in enumerate(DIRECTIONS)] == [
        ("north", "south"),
        ("east", "west"),
        ("south", "north"),
        ("west", "east"),
    ]


@pytest.mark.parametrize(
    ("fields", "rooms"),
    [({}, 1 / 6), ({"n_facts": 3}, 1 / 6), ({"facts": "directions", "n_facts": 2}, 1 / 6)],
)
def test_every_room_is_as_likely(fields, rooms):
    task = FactRetrieval(length=80, n_train=6000, n_validation=1, n_test=2000, **fields)
    answers = task.split("train").targets[:, -1].bincount(minlength=len(ROOMS))
    assert answers.sum() == 6000 and (answers - 1000).abs().max() < 4 * 1000**0.5
    assert task.chance == rooms and task.trivial_score == pytest.approx(rooms, abs=0.035)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (Passkey, {"length": 28}, "`length` must be at least 29, .* got 28"),
        (Passkey, {"test_lengths": (20,)}, "`length` must be at least 29"),
        (Passkey, {"n_keys": 17}, "`n_keys` must be at most 16, the number of colours; got 17"),
        (Passkey, {"n_digits": 0}, "`n_digits` must be at least 1; got 0"),
        (Passkey, {"filler": "none"}, "no `filler` 'none'"),
        (FactRetrieval, {"facts": "directions"}, "`n_facts` must be 2 with `facts='directions'`; got 1"),
        (FactRetrieval, {"facts": "places"}, "no `facts` 'places'"),
        (FactRetrieval, {"length": 14}, "`length` must be at least 15, .* got 14"),
    ],
)
def test_needles_that_do_not_fit_are_refused(kind, fields, message):
    with pytest.raises(ValueError, match=message):
        kind(**fields)
