import dataclasses
import itertools
from collections import Counter

import numpy as np
import pytest
import torch

from linrec.errors import ConfigError
from linrec.lab import tasks
from linrec.lab.tasks import ScoredTask, Source, Task
from linrec.lab.tasks.automata import (
    CycleNavigation,
    EvenPairs,
    EventXor,
    Parity,
    StateTracking,
    WordProblem,
    events,
)
from linrec.lab.tasks.stacks import ModularArithmetic
from linrec.lab.train import LoopConfig, TrainConfig, fit, get_recipe, load_run
from linrec.lab.train.config import config_from_dict, config_to_dict
from linrec.models import SequenceClassifierConfig
from tests.lab.tasks.strings import FEW, check, shares, strings

TRACKING = [name for name in tasks.names() if issubclass(tasks.get(name), StateTracking)]


@pytest.fixture(params=TRACKING)
def name(request):
    return request.param


def test_lengths_are_uniform_and_padding_comes_after(name):
    task = tasks.get(name)(length=19, min_length=4, **{**FEW, "n_train": 4000})
    lengths = Counter(len(string) for string in strings(task, "train"))
    # some languages have strings of odd or of even lengths alone
    places = Counter(task.existing(np.arange(4, 20)).tolist())
    assert set(lengths) == set(places)
    for length, n in places.items():
        share = n / 16
        # held-out strings are lost to training; of none of these lengths more than a few
        assert lengths[length] / 4000 == pytest.approx(
            share, abs=4 * (share * (1 - share) / 4000) ** 0.5 + 0.01
        )


def test_targets_are_at_the_last_symbol_or_at_every_one_and_the_group_is_what_was_read(name):
    # brackets are only asked for at every step
    for dense in (True,) if name == "dyck" else (False, True):
        task = tasks.get(name)(length=15, min_length=9, dense=dense, **FEW)
        test = task.split("test")
        for string, targets, group in zip(
            strings(task), test.targets.tolist(), test.group.tolist(), strict=True
        ):
            asked = [t for t, target in enumerate(targets) if target != -100]
            every = 2 if name == "modular_arithmetic" else 1
            assert asked == (list(range(0, len(string), every)) if dense else [len(string) - 1])
            assert [group[t] for t in asked] == [t + 1 for t in asked]


def test_dense_strings_are_of_one_length_unless_another_is_asked_for():
    assert Parity().shortest == 1
    assert Parity(dense=True).shortest == WordProblem().shortest == 40
    assert Parity(dense=True, min_length=3).shortest == 3
    assert WordProblem(dense=False).shortest == 1


def test_all_strings_that_are_few_are_left_to_training_and_splits_share_none():
    task = Parity(length=12, n_train=5000, n_validation=60, n_test=60)
    # 2^8 = 256 is the first power that is at least 2 (60 + 60)
    assert task.shortest_held_out == 8
    rows = {
        name: {tuple(string) for string in strings(task, name)} for name in ("train", "validation", "test")
    }
    assert min(map(len, rows["test"])) == min(map(len, rows["validation"])) == 8
    assert not rows["test"] & rows["validation"]
    assert not rows["train"] & (rows["test"] | rows["validation"])
    # all strings of up to five bits are trained on, 2 + 4 + 8 + 16 + 32
    assert sum(len(row) <= 5 for row in rows["train"]) == 62


def test_half_of_the_strings_of_the_only_length_are_left_to_training():
    task = Parity(length=8, min_length=8, n_train=2000, n_validation=64, n_test=64)
    rows = {
        name: {tuple(string) for string in strings(task, name)} for name in ("train", "validation", "test")
    }
    assert [len(rows[name]) for name in ("test", "validation", "train")] == [64, 64, 128]
    assert len(rows["test"] | rows["validation"] | rows["train"]) == 256
    # so it is in every epoch
    epoch = task.split("train").of_epoch(seed=0, epoch=3)
    assert {tuple(row) for row in epoch.inputs.tolist()} == rows["train"]


def test_too_few_strings_are_refused_at_once():
    with pytest.raises(
        ValueError,
        match=r"Parity has too few different samples: there must be at least twice as many strings of "
        r"`length` = 8 as `n_validation` \+ `n_test` = 129; got 256 strings",
    ):
        Parity(length=8, n_validation=65, n_test=64)
    with pytest.raises(ValueError, match=r"WordProblem has too few different samples.* 36 strings"):
        WordProblem(group="S3", length=2)


def test_probes_have_strings_of_their_length_alone_that_training_cannot_have(name):
    task = tasks.get(name)(length=12, test_lengths=(21, 33), **FEW)
    assert list(task.probes) == ["21", "33"]
    for length, probe in task.probes.items():
        assert probe.inputs.shape == (100, int(length))
        read = task.existing(int(length))
        assert (probe.inputs[:, :read] < task.n_symbols).all()
        assert (probe.inputs[:, read:] == task.n_symbols).all()
        assert (probe.targets[:, read - 1] != -100).all()
    with pytest.raises(
        ValueError, match=r"`test_lengths` must be greater than `length` = 12.*got \(21, 12\)"
    ):
        tasks.get(name)(length=12, test_lengths=(21, 12), **FEW)


def test_lengths_out_of_range_are_refused():
    for least in (0, 41):
        with pytest.raises(ValueError, match=f"`min_length` must be in 1 .. `length` = 40; got {least}"):
            Parity(min_length=least)
    with pytest.raises(ValueError, match="`length` must be at least 1; got 0"):
        ModularArithmetic(length=0)


@pytest.mark.parametrize("modulus", [2, 3])
@pytest.mark.parametrize("dense", [False, True])
def test_the_target_is_the_number_of_ones(modulus, dense):
    task = Parity(length=17, min_length=1, modulus=modulus, dense=dense, **FEW)
    check(task, lambda bits: bits.count(1) % modulus)
    assert task.chance == 1 / modulus


def test_bits_are_fair_and_remainders_equally_frequent():
    task = Parity(length=30, min_length=20, modulus=3, n_train=4000)
    assert shares(task) == pytest.approx([1 / 3] * 3, abs=4 * (2 / 9 / 4000) ** 0.5)
    inputs = task.split("train").inputs[:, :20]
    assert float((inputs == 1).double().mean()) == pytest.approx(0.5, abs=4 * (0.25 / 80_000) ** 0.5)
    # whoever answers what is most frequent is right by chance
    assert task.trivial_score == pytest.approx(1 / 3, abs=4 * (2 / 9 / 1000) ** 0.5)


def test_a_count_modulo_one_is_refused():
    with pytest.raises(ValueError, match="`modulus` must be at least 2; got 1"):
        Parity(modulus=1)


@pytest.mark.parametrize("dense", [False, True])
def test_the_target_is_the_number_of_changes(dense):
    task = EvenPairs(length=17, min_length=1, dense=dense, **FEW)
    check(task, lambda bits: sum(pair in ((0, 1), (1, 0)) for pair in itertools.pairwise(bits)) % 2)
    assert task.chance == 1 / 2


def test_even_and_odd_are_equally_frequent():
    task = EvenPairs(length=30, min_length=20, n_train=4000)
    assert shares(task) == pytest.approx([0.5, 0.5], abs=4 * (0.25 / 4000) ** 0.5)
    assert task.trivial_score == pytest.approx(0.5, abs=4 * (0.25 / 1000) ** 0.5)


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


FEW_EVENTS = {"n_train": 300, "n_validation": 20, "n_test": 60}
SPLITS = ("train", "validation", "test")


def one_by_one(bits):
    """Events as a program that reads bit by bit notes them: (bit, bits since the event before)."""
    found, since, before = [], 0, None
    for bit in bits:
        since += 1
        if bit != before:
            found.append((bit, since))
            since = 0
        before = bit
    # what came after the last change
    return found + [(before, since)] * (since > 0)


def read(inputs, length, dense):
    """The string of bits that events tell, and a check that nothing follows them."""
    assert not inputs[length:].any()
    bits, counts = inputs[:length, 0].int().tolist(), (32 * inputs[:length, 1]).tolist()
    assert all(count == int(count) >= 1 for count in counts)
    if dense:
        assert set(counts) == {1}
        return bits
    found = []
    for number, (bit, count) in enumerate(zip(bits, counts, strict=True)):
        # the bit before goes on until the event
        found += [found[-1] if number else bit] * (int(count) - 1) + [bit]
    return found


@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_strings_become_events_as_a_program_notes_them_bit_by_bit(n):
    strings = list(itertools.product((0, 1), repeat=n))
    padded = torch.tensor([[*string, 2, 2] for string in strings])
    split = events(padded, torch.zeros(len(strings), dtype=torch.int64), dense=False)
    batch = split.rows(torch.arange(len(strings)))
    for string, inputs, length in zip(strings, batch.inputs, batch.lengths.tolist(), strict=True):
        expected = one_by_one(string)
        assert [(int(bit), round(32 * float(dt))) for bit, dt in inputs[:length]] == expected


@pytest.mark.parametrize("dense", [False, True])
def test_the_target_is_the_parity_of_the_string_that_the_events_tell(dense):
    task = EventXor(length=12, dense=dense, **FEW_EVENTS)
    strings, lengths = {}, []
    for name in SPLITS:
        batch = task.split(name).rows(torch.arange(len(task.split(name))))
        assert batch.inputs.shape[1:] == (12, 2) and batch.inputs.dtype == torch.float32
        strings[name] = [read(x, n, dense) for x, n in zip(batch.inputs, batch.lengths.tolist(), strict=True)]
        assert batch.targets.tolist() == [sum(string) % 2 for string in strings[name]]
    lengths = {name: [len(string) for string in strings[name]] for name in SPLITS}
    assert (min(lengths["train"]), max(lengths["train"])) == (2, 12)
    # 2 * 80 strings are to be found: 2^8 are enough
    assert min(lengths["test"]) == 8
    sets = {name: set(map(tuple, strings[name])) for name in SPLITS}
    assert len(sets["test"]) == 60 and not sets["test"] & (sets["train"] | sets["validation"])
    assert not sets["train"] & sets["validation"]


def test_dense_and_event_based_samples_are_the_same_strings():
    strings = []
    for dense in (False, True):
        batch = EventXor(length=9, dense=dense, **FEW_EVENTS).split("test").rows(torch.arange(60))
        strings.append([read(x, n, dense) for x, n in zip(batch.inputs, batch.lengths.tolist(), strict=True)])
    assert strings[0] == strings[1]


def test_data_depend_on_the_fields_alone():
    np.random.seed(3)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    splits = [EventXor(length=12, **FEW_EVENTS, seed=seed).split("test") for seed in (0, 0, 1)]
    assert torch.equal(splits[0].values, splits[1].values)
    assert not torch.equal(splits[0].values, splits[2].values)
    larger = EventXor(length=12, **{**FEW_EVENTS, "n_train": 400}).split("test")
    assert torch.equal(larger.values, splits[0].values)
    assert torch.equal(before[0], torch.get_rng_state()) and (before[1] == np.random.get_state()[1]).all()


def test_it_is_a_task_with_chance_and_a_trivial_score():
    task: Task = EventXor(length=14, n_train=2000, n_validation=20, n_test=2000)
    source: Source = task.split("test")
    assert isinstance(task, ScoredTask) and task.chance == 0.5
    assert task.trivial_score == pytest.approx(0.5, abs=4 * 0.5 / 2000**0.5)
    majority = torch.mode(task.split("train").labels).values
    assert task.score(majority.expand(2000), source)["accuracy"] == pytest.approx(task.trivial_score)
    assert task.score(source.labels, source) == {"accuracy": 1.0, "accuracy_by_class": [1.0, 1.0]}


def test_fields_out_of_range_are_refused():
    with pytest.raises(ValueError, match="`length` must be at least 2; got 1"):
        EventXor(length=1)
    with pytest.raises(ValueError, match=r"too few different samples: .* got 512 strings"):
        EventXor(length=9, n_test=300)
    with pytest.raises(ValueError, match="no split 'tests'; did you mean 'test'"):
        EventXor(length=12, **FEW_EVENTS).split("tests")


@pytest.mark.parametrize("dense", [False, True])
def test_times_count_the_bits_since_the_event_before(dense):
    task = EventXor(length=12, dense=dense, with_dt=True, **FEW_EVENTS)
    for name in SPLITS:
        batch = task.split(name).to("cpu").rows(torch.arange(20))
        for inputs, dt, length in zip(batch.inputs, batch.dt, batch.lengths.tolist(), strict=True):
            assert dt[:length].tolist() == (32 * inputs[:length, 1]).tolist()
    assert EventXor(length=12, **FEW_EVENTS).split("test").rows(torch.arange(2)).dt is None


def test_training_and_evaluation_give_a_model_the_times(tmp_path):
    model = SequenceClassifierConfig(
        n_outputs=2, n_features=2, d_model=8, n_layers=1, mixer="s5", bidirectional=False, pooling="last"
    )
    loop = LoopConfig(device="cpu", batch_size=15, accumulate=3, steps=3)
    losses = []
    for with_dt in (False, True):
        task = EventXor(length=12, with_dt=with_dt, **FEW_EVENTS)
        result = fit(TrainConfig("tiny", task, model, loop=loop), tmp_path / str(with_dt))
        trained = load_run(tmp_path / str(with_dt)).classifier()
        batch = task.split("test").rows(torch.arange(60))
        logits = trained(batch.inputs, lengths=batch.lengths, dt=batch.dt)
        loss = torch.nn.functional.cross_entropy(logits, batch.targets).item()
        assert result.test["loss"] == pytest.approx(loss, rel=1e-5)
        losses.append(loss)
    assert abs(losses[0] - losses[1]) > 1e-4
    config = TrainConfig("tiny", task, dataclasses.replace(model, n_layers=2, mixer=("s5", "gla")), loop=loop)
    with pytest.raises(ConfigError, match=r"`with_dt` of the task needs mixers .*; 'gla' does not"):
        fit(config, tmp_path / "refused")


def test_the_recipe_trains(tmp_path):
    recipe = get_recipe("event-xor")
    assert config_from_dict(config_to_dict(recipe)) == recipe
    assert recipe.task == EventXor() and recipe.model.pooling == "last" and not recipe.model.bidirectional
    model = {"d_model": 8, "d_channel_mixing": 8}
    config = TrainConfig(
        "tiny",
        EventXor(length=12, **FEW_EVENTS),
        type(recipe.model)(n_outputs=2, n_features=2, bidirectional=False, pooling="last", **model),
        loop=LoopConfig(device="cpu", batch_size=20, steps=2),
    )
    result = fit(config, tmp_path / "run")
    assert 0 < result.test["accuracy"] < 1 and result.test["loss"] == pytest.approx(0.7, abs=0.3)
