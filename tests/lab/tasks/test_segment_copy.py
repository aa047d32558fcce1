import re

import pytest

from linrec.lab.tasks.copying import SegmentCopy

FEW = {"n_train": 20, "n_validation": 5, "n_test": 50}


@pytest.mark.parametrize("kind", ["copy", "reverse"])
def test_symbols_are_repeated_at_the_markers_behind_noise(kind):
    task = SegmentCopy(length=15, kind=kind, n_copied=4, n_symbols=5, n_keys=4, n_noise=3, **FEW)
    assert (task.vocab_size, task.n_outputs) == (13, 5)
    test, noise = task.split("test"), set()
    for inputs, targets in zip(test.inputs.tolist(), test.targets.tolist(), strict=True):
        symbols = inputs[:4]
        assert all(0 <= symbol < 5 for symbol in symbols)
        noise |= set(inputs[4:11])
        assert inputs[11:] == [9] * 4
        assert targets == [-100] * 11 + (symbols[::-1] if kind == "reverse" else symbols)
    assert noise == {10, 11, 12}


def test_every_key_is_asked_for_once_in_any_order():
    task = SegmentCopy(length=12, kind="associative", n_copied=3, n_symbols=5, n_keys=4, **FEW)
    test, orders = task.split("test"), set()
    for inputs, targets in zip(test.inputs.tolist(), test.targets.tolist(), strict=True):
        keys, symbols, asked = inputs[0:6:2], inputs[1:6:2], inputs[-3:]
        assert all(5 <= key < 9 for key in keys) and all(0 <= symbol < 5 for symbol in symbols)
        assert len(set(keys)) == 3 and sorted(asked) == sorted(keys)
        assert inputs[6:9] == [10] * 3
        pairs = dict(zip(keys, symbols, strict=True))
        assert targets == [-100] * 9 + [pairs[key] for key in asked]
        orders.add(tuple(keys.index(key) for key in asked))
    assert len(orders) == 6


def test_new_symbols_are_drawn_in_every_epoch():
    train = SegmentCopy(**FEW).split("train")
    first, second = (train.of_epoch(seed=0, epoch=epoch) for epoch in (0, 1))
    assert not {tuple(row) for row in first.inputs.tolist()} & {tuple(row) for row in second.inputs.tolist()}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"length": 11}, "`length` must be at least 12, so that 6 symbols and their answers fit; got 11"),
        ({"length": 17, "kind": "associative"}, "`length` must be at least 18"),
        (
            {"kind": "associative", "n_keys": 5},
            "`n_keys` must be at least `n_copied` = 6, because keys are distinct; got 5",
        ),
        ({"kind": "reversed"}, "there is no `kind` 'reversed'; did you mean 'reverse'"),
        ({"n_noise": 0}, "`n_noise` must be at least 1; got 0"),
    ],
)
def test_fields_that_do_not_fit(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        SegmentCopy(**fields)
