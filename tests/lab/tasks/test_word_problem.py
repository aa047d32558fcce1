import itertools

import pytest

from linrec.lab.tasks.automata import WordProblem
from tests.lab.tasks.strings import FEW, check, shares


def named(group):
    """The elements as permutations, in the order of their numbers, written down from the definition."""
    letters = range(int(group[1:]))
    if group[0] == "Z":
        return [tuple((i + k) % len(letters) for i in letters) for k in letters]
    found = sorted(itertools.permutations(letters))
    if group[0] == "S":
        return found

    def swaps(p):
        # sorted by exchanging two letters at a time
        p, n = list(p), 0
        for i in letters:
            while p[i] != i:
                j = p[i]
                p[i], p[j], n = p[j], p[i], n + 1
        return n

    return [p for p in found if swaps(p) % 2 == 0]


@pytest.mark.parametrize(
    ("group", "order"), [("S2", 2), ("S3", 6), ("A4", 12), ("S4", 24), ("A5", 60), ("S5", 120), ("Z7", 7)]
)
@pytest.mark.parametrize("dense", [False, True])
def test_the_target_is_the_product(group, order, dense):
    elements = named(group)

    def product(string):
        # where each letter goes when the elements are applied in the order in which they are read
        letters = list(range(len(elements[0])))
        for element in string:
            letters = [elements[element][letter] for letter in letters]
        return elements.index(tuple(letters))

    task = WordProblem(group=group, length=12, min_length=9, dense=dense, **FEW)
    assert [tuple(p) for p in task.elements.tolist()] == elements
    assert len(elements) == order == task.n_outputs == task.vocab_size - 1 == 1 / task.chance
    check(task, product)


def test_products_are_uniform():
    task = WordProblem(group="S3", n_train=500)
    n = 500 * 40
    assert shares(task) == pytest.approx([1 / 6] * 6, abs=4 * (5 / 36 / n) ** 0.5)
    assert task.trivial_score == pytest.approx(1 / 6, abs=4 * (5 / 36 / 40_000) ** 0.5)


def test_the_largest_groups_have_the_products_of_all_elements():
    for group, order in (("S6", 720), ("A6", 360), ("Z1000", 1000)):
        products = WordProblem(group=group).products
        # a row and a column each have every element once, 0 is the identity
        assert products.shape == (order, order)
        assert all(
            sorted(line) == list(range(order))
            for line in (*products[5:9].tolist(), *products[:, 5:9].T.tolist())
        )
        assert products[0].tolist() == products[:, 0].tolist() == list(range(order))
    assert (products == products.T).all() and products[700, 301] == 1


@pytest.mark.parametrize("group", ["S1", "S7", "A2", "A7", "Z1", "Z1001", "D4", "S", "s5"])
def test_other_groups_are_refused(group):
    with pytest.raises(
        ValueError, match=f"`group` must be one of S2 .. S6, A3 .. A6 and Z2 .. Z1000; got '{group}'"
    ):
        WordProblem(group=group)
