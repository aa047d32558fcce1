import dataclasses
import itertools

import numpy as np
import pytest
import torch

from linrec.errors import ConfigError
from linrec.lab.tasks import ScoredTask, Source, Task
from linrec.lab.tasks.automata import EventXor, events
from linrec.lab.train import LoopConfig, TrainConfig, fit, get_recipe, load_run
from linrec.lab.train.config import config_from_dict, config_to_dict
from linrec.models import SequenceClassifierConfig

FEW = {"n_train": 300, "n_validation": 20, "n_test": 60}
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
    task = EventXor(length=12, dense=dense, **FEW)
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
        batch = EventXor(length=9, dense=dense, **FEW).split("test").rows(torch.arange(60))
        strings.append([read(x, n, dense) for x, n in zip(batch.inputs, batch.lengths.tolist(), strict=True)])
    assert strings[0] == strings[1]


def test_data_depend_on_the_fields_alone():
    np.random.seed(3)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    splits = [EventXor(length=12, **FEW, seed=seed).split("test") for seed in (0, 0, 1)]
    assert torch.equal(splits[0].values, splits[1].values)
    assert not torch.equal(splits[0].values, splits[2].values)
    larger = EventXor(length=12, **{**FEW, "n_train": 400}).split("test")
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
        EventXor(length=12, **FEW).split("tests")


@pytest.mark.parametrize("dense", [False, True])
def test_times_count_the_bits_since_the_event_before(dense):
    task = EventXor(length=12, dense=dense, with_dt=True, **FEW)
    for name in SPLITS:
        batch = task.split(name).to("cpu").rows(torch.arange(20))
        for inputs, dt, length in zip(batch.inputs, batch.dt, batch.lengths.tolist(), strict=True):
            assert dt[:length].tolist() == (32 * inputs[:length, 1]).tolist()
    assert EventXor(length=12, **FEW).split("test").rows(torch.arange(2)).dt is None


def test_training_and_evaluation_give_a_model_the_times(tmp_path):
    model = SequenceClassifierConfig(
        n_outputs=2, n_features=2, d_model=8, n_layers=1, mixer="s5", bidirectional=False, pooling="last"
    )
    loop = LoopConfig(device="cpu", batch_size=15, accumulate=3, steps=3)
    losses = []
    for with_dt in (False, True):
        task = EventXor(length=12, with_dt=with_dt, **FEW)
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
        EventXor(length=12, **FEW),
        type(recipe.model)(n_outputs=2, n_features=2, bidirectional=False, pooling="last", **model),
        loop=LoopConfig(device="cpu", batch_size=20, steps=2),
    )
    result = fit(config, tmp_path / "run")
    assert 0 < result.test["accuracy"] < 1 and result.test["loss"] == pytest.approx(0.7, abs=0.3)
