import pytest

from linrec.lab.tasks.copying import Copying, SelectiveCopying

FEW = {"n_train": 20, "n_validation": 5, "n_test": 50}


@pytest.mark.parametrize("reverse", [False, True])
def test_symbols_are_repeated_where_markers_ask_for_them(reverse):
    task = Copying(length=7, n_copied=4, n_symbols=5, reverse=reverse, **FEW)
    test = task.split("test")
    for inputs, targets in zip(test.inputs.tolist(), test.targets.tolist(), strict=True):
        symbols = inputs[:4]
        assert all(1 <= symbol <= 5 for symbol in symbols)
        assert inputs[4:] == [0] * 7 + [6] * 4
        assert targets == [-100] * 11 + (symbols[::-1] if reverse else symbols)


def test_new_symbols_are_drawn_in_every_epoch():
    train = Copying(length=7, **FEW).split("train")
    first, second = (train.of_epoch(seed=0, epoch=epoch) for epoch in (0, 1))
    assert not {tuple(row) for row in first.inputs.tolist()} & {tuple(row) for row in second.inputs.tolist()}


def test_scattered_symbols_are_repeated_in_their_order():
    task = SelectiveCopying(length=9, n_copied=4, n_symbols=5, **FEW)
    test = task.split("test")
    for inputs, targets in zip(test.inputs.tolist(), test.targets.tolist(), strict=True):
        symbols = [token for token in inputs[:9] if token]
        assert len(symbols) == 4 and all(1 <= symbol <= 5 for symbol in symbols)
        assert inputs[9:] == [6] * 4
        assert targets == [-100] * 9 + symbols
    # every step is as likely as another
    found = (
        SelectiveCopying(length=9, n_copied=4, n_train=4500, n_validation=1, n_test=1)
        .split("train")
        .inputs[:, :9]
    )
    assert ((found > 0).sum(0) - 2000).abs().max() < 4 * (4500 * 4 / 9 * 5 / 9) ** 0.5


def test_a_task_without_room_is_refused():
    with pytest.raises(ValueError, match="`n_copied` must be at least 1; got 0"):
        Copying(n_copied=0)
    with pytest.raises(ValueError, match="`length` must be at least `n_copied` = 16; got 15"):
        SelectiveCopying(length=15)
