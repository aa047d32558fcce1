import pytest

from linrec.lab.tasks.automata import CycleNavigation
from tests.lab.tasks.strings import FEW, check, shares


@pytest.mark.parametrize("n_places", [5, 2])
@pytest.mark.parametrize("dense", [False, True])
def test_the_target_is_where_the_moves_lead(n_places, dense):
    def place(moves):
        circle, at = list(range(n_places)), 0
        for move in moves:
            if move == 1:
                at = circle[at + 1] if at + 1 < n_places else 0
            elif move == 2:
                # a list counts backwards from its end by itself
                at = circle[at - 1]
        return at

    check(CycleNavigation(length=17, min_length=1, n_places=n_places, dense=dense, **FEW), place)


def test_moves_and_places_are_equally_frequent():
    # after twenty moves the places are uniform within 0.001
    task = CycleNavigation(length=30, min_length=20, n_train=4000)
    assert shares(task) == pytest.approx([0.2] * 5, abs=4 * (0.16 / 4000) ** 0.5 + 0.001)
    inputs = task.split("train").inputs[:, :20]
    for move in range(3):
        assert float((inputs == move).double().mean()) == pytest.approx(
            1 / 3, abs=4 * (2 / 9 / 80_000) ** 0.5
        )
    assert task.trivial_score == pytest.approx(task.chance, abs=4 * (0.16 / 1000) ** 0.5)


def test_a_circle_of_one_place_is_refused():
    with pytest.raises(ValueError, match="`n_places` must be at least 2; got 1"):
        CycleNavigation(n_places=1)
