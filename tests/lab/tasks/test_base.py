from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import pytest
import torch

from linrec.lab.tasks import MemoryHorizon, ScoredTask, Source, Task
from linrec.lab.tasks.fields import CheckedTask

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


@dataclass(frozen=True, kw_only=True)
class Parent(CheckedTask):
    size: int = 1
    width: int | None = None
    kind: Literal["short", "long"] = "short"
    path: Path | None = None
    least: ClassVar[Mapping[str, int]] = {"size": 1, "width": 2}


@dataclass(frozen=True, kw_only=True)
class Child(Parent):
    depth: int = 1
    least: ClassVar[Mapping[str, int]] = {"depth": 1, "width": 3}

    def check(self) -> None:
        if self.depth > self.size:
            raise ValueError("`depth` must be at most `size`")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        # of the base class
        ({"size": 0}, "`size` must be at least 1; got 0"),
        ({"depth": 0}, "`depth` must be at least 1; got 0"),
        # the subclass replaces the minimum
        ({"width": 2}, "`width` must be at least 3; got 2"),
        ({"size": None}, "`size` must be at least 1; got None"),
        ({"kind": "lang"}, "no `kind` 'lang'; did you mean 'long'"),
        ({"kind": 3}, "no `kind` 3"),
        ({"depth": 2}, "`depth` must be at most `size`"),
    ],
)
def test_fields_are_checked_by_their_annotations_and_minima(fields, message):
    with pytest.raises(ValueError, match=message):
        Child(**fields)


def test_paths_may_be_strings_and_numbers_may_be_left_out():
    task = Child(path="~/data", width=None)
    assert task.path == Path.home() / "data"
    with pytest.raises(ValueError, match="no split 'tests'; did you mean 'test'"):
        task.split("tests")
