import torch

from linrec.lab.tasks import MemoryHorizon, ScoredTask, Source, Task

TASK = MemoryHorizon(length=6, n_resets=1, n_samples=12, n_validation=2, n_test=3)


def test_rows_are_the_samples_asked_for_in_that_order():
    split = TASK.split("train")
    index = torch.tensor([4, 0, 4])
    batch = split.rows(index)
    assert torch.equal(batch.inputs, torch.stack([split.inputs[n] for n in (4, 0, 4)]))
    assert torch.equal(batch.targets, torch.stack([split.targets[n] for n in (4, 0, 4)]))
    assert batch.reset is None
    assert split.rows(index[:0]).inputs.shape == (0, 6)


def test_a_split_in_memory_is_the_same_in_every_epoch_and_moves_whole():
    split = TASK.split("validation")
    assert split.of_epoch(seed=1, epoch=2) is split
    moved = split.to("meta")
    assert len(moved) == len(split)
    assert {t.device.type for t in (moved.inputs, moved.targets, moved.group)} == {"meta"}
    # rows come from where the split is, wherever the index is
    assert moved.rows(torch.tensor([1])).targets.device.type == "meta"
    assert split.inputs.device.type == "cpu"


def test_memory_horizon_is_a_task_that_scores_and_needs_no_preparation():
    task: Task = TASK
    source: Source = task.split("test")
    assert task.prepared() is TASK and task.section == "task"
    assert len(source) == 3
    assert isinstance(task, ScoredTask)
