import re

import pytest
import torch

from linrec.lab.tasks import NO_TARGET
from linrec.lab.tasks.copying import (
    Compression,
    Copying,
    LstmTask2b,
    Memorization,
    SegmentCopy,
    SelectiveCopying,
)
from tests.lab.tasks.recall import FEW as FEW_STRINGS
from tests.lab.tasks.recall import check_against

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


def test_new_symbols_of_segment_copy_are_drawn_in_every_epoch():
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


@pytest.mark.parametrize("recurs", [True, False])
def test_the_first_symbol_is_asked_for_at_the_end(recurs):
    task = LstmTask2b(length=6, n_symbols=12, recurs=recurs, n_train=10, n_validation=10, n_test=600)
    test = task.split("test")
    for tokens, targets in zip(test.inputs.tolist(), test.targets.tolist(), strict=True):
        assert targets == [-100] * 5 + tokens[:1] and tokens[0] in (0, 1)
    # the docstring says how much memory a step of a sample takes
    assert test.inputs.element_size() + test.targets.element_size() == 16
    assert test.inputs.shape == test.targets.shape == (600, 6)
    counts = torch.bincount(test.inputs[:, 1:].flatten(), minlength=13)
    first, share = (1, 1 / 12) if recurs else (2, 1 / 11)
    assert counts[:first].sum() == 0
    assert (counts[first:] - 3000 * share).abs().max() < 4 * (3000 * share * (1 - share)) ** 0.5
    assert abs(int(test.inputs[:, 0].sum()) - 300) < 4 * 600**0.5 / 2


def test_a_sequence_that_ends_where_it_begins_is_refused():
    with pytest.raises(ValueError, match="`length` must be at least 2; got 1"):
        LstmTask2b(length=1)
    with pytest.raises(ValueError, match="`n_symbols` must be at least 2; got 1"):
        LstmTask2b(n_symbols=1)


@pytest.mark.parametrize("noise", [0.0, 0.5, 0.95])
def test_every_position_is_asked_for_once_unless_there_is_noise(noise):
    task = Compression(length=7, n_symbols=5, n_noise=3, noise=noise, **FEW_STRINGS)

    def oracle(inputs):
        string, end, positions = inputs[:7], inputs[7], [token - 9 for token in inputs[8:]]
        assert end == 8 and sorted(positions) == list(range(7))
        symbols = {8 + step: string[place] for step, place in enumerate(positions)}
        assert all(token < 8 for token in string)
        return {step: symbol for step, symbol in symbols.items() if symbol < 5}

    for name in ("train", "test"):
        check_against(oracle, task.split(name))


def test_noise_and_order_are_as_likely_everywhere():
    task = Compression(length=4, noise=0.5, n_noise=2, n_train=8000, n_validation=1, n_test=1)
    inputs = task.split("train").inputs
    noise = (inputs[:, :4] >= 15).double().mean(0)
    # one place of four is chosen to have none
    assert (noise - 0.5 * 3 / 4).abs().max() < 4 * (0.25 / 8000) ** 0.5
    for step in range(5, 9):
        assert (inputs[:, step].bincount(minlength=22)[18:] - 2000).abs().max() < 4 * 2000**0.5


def test_shorter_strings_are_probes_and_longer_ones_have_no_positions():
    task = Compression(length=9, test_lengths=(6,), **FEW_STRINGS)
    probe = task.probes["6"]
    assert probe.inputs.shape == (60, 13) and task.vocab_size == 25
    # positions have the tokens that they have in training
    assert torch.equal(probe.inputs[:, 7:].sort(1).values, torch.arange(16, 22).expand(60, 6))
    with pytest.raises(ValueError, match=r"`test_lengths` must be at most `length` = 31, .*; got 32"):
        Compression(test_lengths=(32,))


def test_fields_out_of_range_are_refused():
    with pytest.raises(ValueError, match=r"`n_noise` must be at least 1 with `noise` = 0\.2; got 0"):
        Compression(noise=0.2)
    with pytest.raises(ValueError, match=r"`noise` must be at least 0 and below 1; got -0\.1"):
        Compression(noise=-0.1)
    with pytest.raises(ValueError, match="`n_symbols` must be at least 2; got 1"):
        Compression(n_symbols=1)
    assert (Compression(**FEW_STRINGS).split("test").targets[:, :32] == NO_TARGET).all()


FEW_FACTS = {"n_train": 300, "n_validation": 5, "n_test": 60}


def facts_of(split):
    """Learn by heart what the samples say."""
    facts = {}
    for inputs, targets in zip(split.inputs.tolist(), split.targets.tolist(), strict=True):
        for step, target in enumerate(targets):
            if target != NO_TARGET:
                assert facts.setdefault(inputs[step - 1], target) == target
    return facts


@pytest.mark.parametrize("noise", [0.0, 0.6])
def test_what_the_training_samples_say_answers_the_test(noise):
    task = Memorization(length=12, n_facts=20, n_noise=3, noise=noise, test_lengths=(40,), **FEW_FACTS)
    facts = facts_of(task.split("train"))
    assert sorted(facts) == sorted(facts.values()) == list(range(20))

    def oracle(inputs):
        answers = {}
        for step in range(0, len(inputs), 2):
            key, blank = inputs[step : step + 2]
            assert (key < 20 and blank == 20) or (key > 20 and blank > 20)
            if key < 20:
                answers[step + 1] = facts[key]
        return answers

    check_against(oracle, task.split("test"))
    check_against(oracle, task.probes["40"])
    noisy = (task.split("train").inputs[:, ::2] > 20).double().mean().item()
    assert noisy == pytest.approx(noise * 5 / 6, abs=4 * (0.25 / 1800) ** 0.5)


def test_the_facts_are_those_of_the_seed_and_keys_are_uniform():
    one, same, other = (
        Memorization(n_facts=10, fresh=fresh, seed=seed, n_train=2000)
        for seed, fresh in ((0, False), (0, True), (1, False))
    )
    assert facts_of(one.split("train")) == facts_of(same.split("train")) != facts_of(other.split("train"))
    assert facts_of(same.split("train").of_epoch(seed=3, epoch=4)) == facts_of(one.split("test"))
    keys = one.split("train").inputs[:, ::2].flatten().bincount(minlength=10)
    assert (keys - 3200).abs().max() < 4 * 3200**0.5


def test_fields_of_memorization_out_of_range_are_refused():
    with pytest.raises(ValueError, match="`length` must be even, a blank after every key; got 31"):
        Memorization(length=31)
    with pytest.raises(ValueError, match=r"`n_noise` must be at least 1 with `noise` = 0\.2; got 0"):
        Memorization(noise=0.2)
    with pytest.raises(ValueError, match="`n_facts` must be at least 2; got 1"):
        Memorization(n_facts=1)
