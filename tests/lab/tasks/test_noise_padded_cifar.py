import numpy as np
import pytest
import torch

from linrec.lab.tasks import ScoredTask, Source, Task
from linrec.lab.tasks.cifar import NoisePaddedCIFAR, SequentialCIFAR
from linrec.text import DataError
from tests.lab.tasks.cifar import TEST, TRAIN, folder

__all__ = ["folder"]


def everything(split):
    return split.rows(torch.arange(len(split)))


def make(path, **fields):
    return NoisePaddedCIFAR(path=path, n_validation=7, **{"length": 100, **fields})


def test_the_rows_of_an_image_come_first_and_noise_after_them(folder):
    task = make(folder)
    split: Source = task.split("test")
    batch = everything(split)
    assert batch.inputs.shape == (len(TEST[1]), 100, 96) and batch.inputs.dtype == torch.float32
    rows = SequentialCIFAR(path=folder, n_validation=7, by_row=True).split("test")
    assert torch.equal(batch.inputs[:, :32], everything(rows).inputs)
    assert batch.targets.tolist() == TEST[1].tolist() and len(split) == len(TEST[1])
    noise = batch.inputs[:, 32:].double()
    n = noise.numel()
    # mean, variance and correlations of independent standard normal numbers, within four standard errors
    assert abs(float(noise.mean())) < 4 / n**0.5 and abs(float(noise.var()) - 1) < 4 * (2 / n) ** 0.5
    for one, other in (
        (noise[1:], noise[:-1]),
        (noise[:, 1:], noise[:, :-1]),
        (noise[..., 1:], noise[..., :-1]),
    ):
        assert abs(float((one * other).mean())) < 4 / one.numel() ** 0.5


def test_noise_is_of_the_image_the_split_the_epoch_and_the_seed(folder):
    task = make(folder)
    train = task.split("train")
    noise = everything(train).inputs[:, 32:]
    # whatever else is in the batch
    assert torch.equal(train.rows(torch.tensor([5, 2])).inputs[:, 32:], noise[[5, 2]])
    assert torch.equal(everything(make(folder).split("train")).inputs[:, 32:], noise)
    others = [
        everything(make(folder, seed=1).split("train")),
        everything(train.of_epoch(seed=0, epoch=0)),
        everything(train.of_epoch(seed=0, epoch=1)),
        everything(train.of_epoch(seed=1, epoch=0)),
        everything(task.split("validation")),
    ]
    first = [batch.inputs[0, 32:] for batch in others]
    assert all(not torch.isin(one, noise[0]).any() for one in first)
    assert all(not torch.equal(one, other) for i, one in enumerate(first) for other in first[:i])
    images = everything(train).inputs[:, :32]
    assert all(torch.equal(batch.inputs[:, :32], images) for batch in others[:4])
    again = everything(task.split("train").of_epoch(seed=0, epoch=1))
    assert torch.equal(again.inputs, others[2].inputs)


def test_the_global_random_state_is_neither_read_nor_changed(folder):
    torch.manual_seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    everything(make(folder).split("train"))
    assert torch.equal(before[0], torch.get_rng_state()) and (before[1] == np.random.get_state()[1]).all()


def test_fixed_noise_is_the_same_for_all(folder):
    task = make(folder, noise="fixed")
    noises = [everything(task.split(name)).inputs[:, 32:] for name in ("train", "validation", "test")]
    noises.append(everything(task.split("train").of_epoch(seed=0, epoch=1)).inputs[:, 32:])
    for noise in noises:
        assert torch.equal(noise, noises[0][:1].expand_as(noise))
    assert noises[0][0].std() > 0.9
    other = make(folder, noise="fixed", seed=1).split("test").rows(torch.tensor([0])).inputs[0, 32:]
    assert not torch.isin(other, noises[0][0]).any()


def test_it_is_a_task_and_says_what_needs_no_model(folder):
    task: Task = make(folder)
    assert isinstance(task, Task) and isinstance(task, ScoredTask)
    assert (task.vocab_size, task.n_features, task.n_outputs, task.chance) == (None, 96, 10, 0.1)
    majority = np.bincount(TRAIN[1][:-7]).argmax()
    assert task.trivial_score == pytest.approx((TEST[1] == majority).mean()) and majority in TEST[1]
    test = task.split("test")
    assert task.score(test.labels, test)["accuracy"] == 1


def test_what_is_refused():
    with pytest.raises(ValueError, match="`length` must be at least 32; got 31"):
        NoisePaddedCIFAR(length=31)
    with pytest.raises(ValueError, match=r"`noise` 'fixd'.*did you mean 'fixed'"):
        NoisePaddedCIFAR(noise="fixd")
    with pytest.raises(DataError, match=r"got None. It must be the binary version of CIFAR-10.*--data.path"):
        NoisePaddedCIFAR().prepared()
