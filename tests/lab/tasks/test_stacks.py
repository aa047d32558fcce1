import itertools
import re
from collections import Counter

import pytest

from linrec.lab.tasks.stacks import ModularArithmetic, Reversing
from tests.lab.tasks.recall import FEW as FEW_MIRRORED
from tests.lab.tasks.recall import check_against
from tests.lab.tasks.strings import FEW, check, shares, strings


def written(task, string):
    return "".join([*map(str, range(task.modulus)), *"+-*()"][symbol] for symbol in string)


def evaluated(task):
    """What Python's own arithmetic says; None of what is no expression yet."""

    def value(string):
        text = written(task, string)
        assert re.fullmatch(r"[\d+*()-]*", text)
        return None if text[-1] in "+-*" else eval(text) % task.modulus

    return value


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("operators", ["+-*", "-", "*+"])
def test_the_target_is_the_value_with_multiplication_first(dense, operators):
    task = ModularArithmetic(length=20, min_length=1, dense=dense, operators=operators, **FEW)
    check(task, evaluated(task))
    text = [written(task, string) for string in strings(task, "train")]
    assert all(re.fullmatch(r"\d([-+*]\d)*", expression) for expression in text)
    assert set("".join(text)) == {*"01234", *operators}
    assert {len(expression) for expression in text} == set(range(1, 20, 2))


@pytest.mark.parametrize("operators", ["+-*", "-*"])
def test_the_target_is_the_value_of_brackets(operators):
    task = ModularArithmetic(length=30, brackets=True, modulus=7, operators=operators, **FEW)
    check(task, evaluated(task))
    # until nothing is left to be taken for a single digit
    for string in strings(task, "train"):
        text, before = written(task, string), ""
        while text != before:
            before = text
            text = re.sub(rf"\((-?\d|-?\d[{re.escape(operators)}]-?\d)\)", "0", text)
        assert re.fullmatch(r"-?\d", text)


def test_strings_with_brackets_are_counted_and_their_splits_uniform():
    task = ModularArithmetic(
        length=9, min_length=9, brackets=True, modulus=2, n_train=20_000, n_validation=1, n_test=1
    )

    def expressions(length):
        atoms = {1: ["0", "1"], 2: ["-0", "-1"], 3: ["(0)", "(1)"], 4: ["(-0)", "(-1)"]}
        if length in atoms:
            return atoms[length]
        return [
            f"({a}{o}{b})"
            for left in range(1, length - 3)
            for a, o, b in itertools.product(expressions(left), "+-*", expressions(length - 3 - left))
        ]

    for length in range(1, 10):
        assert task.n_strings(length) == len(set(expressions(length)))
    drawn = [written(task, string) for string in strings(task, "train")]
    assert set(drawn) <= set(expressions(9))
    # of five splits the second is the only one that begins so: a minus and a digit on the left
    assert Counter(text[1:2] == "-" for text in drawn)[True] / 20_000 == pytest.approx(0.2, abs=0.012)


def test_expressions_without_brackets_are_counted():
    task = ModularArithmetic(modulus=3, operators="+*")
    assert [task.n_strings(length) for length in range(1, 7)] == [3, 3, 18, 18, 108, 108]


def test_values_are_uniform_but_for_products_of_brackets_which_are_often_zero():
    # a term of a single digit makes the sum uniform; of eleven digits or more 1% have none
    simple = ModularArithmetic(min_length=21, n_train=4000, n_test=4000)
    assert simple.chance == 0.2
    assert shares(simple) == pytest.approx([0.2] * 5, abs=4 * (0.16 / 4000) ** 0.5 + 0.005)
    assert simple.trivial_score == pytest.approx(0.2, abs=0.03)
    brackets = ModularArithmetic(brackets=True, n_train=4000, n_test=4000)
    assert 0.25 < brackets.trivial_score < 0.35
    sums = ModularArithmetic(brackets=True, operators="+-", n_train=4000)
    assert shares(sums) == pytest.approx([0.2] * 5, abs=4 * (0.16 / 4000) ** 0.5)


def test_what_cannot_be_asked_for_is_refused():
    for operators in ("", "++", "+/"):
        with pytest.raises(ValueError, match=re.escape(f"characters of '+-*'; got {operators!r}")):
            ModularArithmetic(operators=operators)
    with pytest.raises(ValueError, match="`dense` must be False with `brackets`"):
        ModularArithmetic(brackets=True, dense=True)
    with pytest.raises(ValueError, match="`modulus` must be at least 2; got 1"):
        ModularArithmetic(modulus=1)


@pytest.mark.parametrize("n_symbols", [2, 5])
def test_strings_are_said_backwards(n_symbols):
    task = Reversing(length=12, n_symbols=n_symbols, **FEW_MIRRORED)

    def oracle(inputs):
        string = inputs[: inputs.index(n_symbols)]
        length = len(string)
        assert max(string) < n_symbols
        assert inputs[length:] == [n_symbols] * length + [n_symbols + 1] * (24 - 2 * length)
        return dict(enumerate(reversed(string), start=length))

    for name in ("train", "test"):
        check_against(oracle, task.split(name))


def test_lengths_are_uniform_and_scores_tell_them_apart():
    task = Reversing(length=10, min_length=3, n_train=8000, n_validation=1, n_test=1)
    inputs = task.split("train").inputs
    assert (((inputs == 2).sum(1).bincount(minlength=11)[3:] - 1000).abs() < 4 * 1000**0.5).all()
    group = task.split("train").group
    assert (group == (inputs == 2).sum(1, keepdim=True)).all()


def test_short_strings_are_left_to_training_and_probes_are_of_one_length():
    task = Reversing(length=9, n_train=4000, n_validation=30, n_test=40, test_lengths=(10, 30))
    # of seven bits there are 128 strings, and of six fewer than 2 (30 + 40)
    assert task.shortest_held_out == 8
    lengths = {name: set(task.split(name).group[:, 0].tolist()) for name in ("train", "validation", "test")}
    assert lengths == {"train": set(range(1, 10)), "validation": {8, 9}, "test": {8, 9}}
    for length in (10, 30):
        probe = task.probes[str(length)]
        assert probe.inputs.shape == (40, 2 * length) and (probe.inputs[:, length:] == 2).all()
    ones = Counter(
        map(tuple, task.split("train").inputs[task.split("train").group[:, 0] == 1][:, :1].tolist())
    )
    assert set(ones) == {(0,), (1,)}


def test_probes_have_strings_of_lengths_that_training_cannot_have():
    # of 4,096 strings of twelve bits training would have had some that a probe has
    with pytest.raises(
        ValueError, match=r"`test_lengths` must be greater than `length` = 14.*got \(20, 12\)"
    ):
        Reversing(length=14, n_validation=100, n_test=500, test_lengths=(20, 12))
    with pytest.raises(ValueError, match=r"`test_lengths` must be greater than `length` = 40.*got \(40,\)"):
        Reversing(test_lengths=(40,))


def test_fields_out_of_range_are_refused():
    with pytest.raises(ValueError, match=r"`min_length` must be in 1 \.\. `length` = 40; got 41"):
        Reversing(min_length=41)
    with pytest.raises(ValueError, match=r"strings of `length` = 5 as .* = 2000; got 32"):
        Reversing(length=5)
    with pytest.raises(ValueError, match="`length` must be at least 1; got 0"):
        Reversing(length=0)
    with pytest.raises(ValueError, match="`n_symbols` must be at least 2; got 1"):
        Reversing(n_symbols=1)
