import itertools

import numpy as np
import pytest
import torch

from linrec.lab.tasks import MemoryHorizon, TokenSplit
from linrec.lab.train import ConfigError
from linrec.lab.train.data import Batches, begins_epoch, epoch_order, staged

SPLIT = MemoryHorizon(length=8, n_resets=1, n_samples=15, n_validation=2, n_test=2).split("train")
CPU = torch.device("cpu")


def test_order_is_a_pure_function_of_seed_and_epoch() -> None:
    order = epoch_order(100, seed=1, epoch=2)
    torch.manual_seed(5)
    assert torch.equal(order, epoch_order(100, seed=1, epoch=2))
    assert order.sort().values.tolist() == list(range(100))
    assert not torch.equal(order, epoch_order(100, seed=1, epoch=3))
    assert not torch.equal(order, epoch_order(100, seed=2, epoch=2))


def test_order_leaves_the_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    epoch_order(100, seed=1, epoch=2)
    assert torch.equal(before, torch.get_rng_state())


def test_an_epoch_visits_samples_once_and_drops_the_rest() -> None:
    batches = Batches(SPLIT, batch_size=4, seed=0, device=CPU)
    epoch = list(batches.epoch(0))
    assert len(batches) == len(epoch) == 2
    assert all(inputs.shape == targets.shape == (4, 8) for inputs, targets, *_ in epoch)
    rows = epoch_order(11, seed=0, epoch=0)[:8]
    assert torch.equal(torch.cat([batch.inputs for batch in epoch]), SPLIT.inputs[rows])
    assert torch.equal(torch.cat([batch.targets for batch in epoch]), SPLIT.targets[rows])


def test_an_epoch_can_start_in_the_middle() -> None:
    batches = Batches(SPLIT, batch_size=3, seed=0, device=CPU)
    whole, rest = list(batches.epoch(1)), list(batches.epoch(1, start=2))
    assert len(rest) == len(whole) - 2
    assert torch.equal(whole[2].inputs, rest[0].inputs)


def test_processes_share_each_batch() -> None:
    whole = list(Batches(SPLIT, batch_size=4, seed=0, device=CPU).epoch(1))
    parts = [
        list(Batches(SPLIT, batch_size=4, seed=0, device=CPU, rank=rank, processes=2).epoch(1))
        for rank in range(2)
    ]
    for batch, one, other in zip(whole, *parts, strict=True):
        assert torch.equal(batch.inputs[0::2], one.inputs) and torch.equal(batch.inputs[1::2], other.inputs)
    with pytest.raises(ConfigError, match="multiple of the 3 processes; got 4"):
        Batches(SPLIT, batch_size=4, seed=0, device=CPU, processes=3)


def test_a_batch_larger_than_the_split_is_refused() -> None:
    with pytest.raises(ConfigError, match="training samples, 11; got 12"):
        Batches(SPLIT, batch_size=12, seed=0, device=CPU)


@pytest.mark.parametrize("step", [0, 1, 2, 3, 5, 6])
def test_stages_follow_one_another_and_a_run_goes_on_within_them(step: int) -> None:
    short, long = (
        Batches(
            MemoryHorizon(length=n, n_resets=1, n_samples=15, n_validation=2, n_test=2).split("train"),
            batch_size=4,
            seed=0,
            device=CPU,
        )
        for n in (4, 6)
    )
    whole = Batches(SPLIT, batch_size=4, seed=0, device=CPU)
    stages = [(0, short), (2, long), (5, whole)]
    expected = (
        [*short.epoch(0)][:2] + [*long.epoch(0), *long.epoch(1)][:3] + [*whole.epoch(0), *whole.epoch(1)]
    )
    found = list(itertools.islice(staged(stages, step), 9 - step))
    assert len(expected) == 9
    for batch, other in zip(expected[step:], found, strict=True):
        assert torch.equal(batch.inputs, other.inputs)


def test_streams_continue_row_by_row_and_drop_another_rest_in_each_epoch() -> None:
    # 24 windows, of which 20 are in the streams
    split = TokenSplit.of(np.arange(100, dtype=np.uint16), length=4)
    batches = Batches(split, batch_size=5, seed=0, device=CPU, streams=True)
    assert len(batches) == 4
    left_out = set(range(1, 100))
    for epoch in range(200):
        found = list(batches.epoch(epoch))
        tokens = torch.cat([batch.inputs for batch in found], 1)
        # of consecutive numbers, so all of a row follow from its first
        assert torch.equal(tokens, tokens[:, :1] + torch.arange(16))
        assert torch.equal(tokens[:, 0], tokens[0, 0] + 16 * torch.arange(5))
        left_out -= set(torch.cat([batch.targets for batch in found], 1).flatten().tolist())
    assert not left_out
    assert torch.equal(found[3].inputs, next(batches.epoch(199, start=3)).inputs)


def test_epochs_begin_anew_in_each_stage() -> None:
    one, other = (Batches(SPLIT, batch_size=size, seed=0, device=CPU) for size in (4, 3))
    assert (len(one), len(other)) == (2, 3)
    stages = [(0, one), (3, other)]
    assert [step for step in range(12) if begins_epoch(stages, step)] == [0, 2, 3, 6, 9]
