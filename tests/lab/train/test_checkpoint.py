import errno
import os
import resource
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from linrec import files, tensor_files
from linrec.files import partial_of
from linrec.lab.train import CheckpointError
from linrec.lab.train import checkpoint as module
from linrec.lab.train.checkpoint import (
    CURRENT,
    PREVIOUS,
    Checkpoint,
    load_checkpoint,
    save_checkpoint,
)


def example(step: int) -> Checkpoint:
    weight = torch.arange(1000.0) + step
    return Checkpoint(
        {
            "model.weight": weight,
            "model.tied": weight,
            "model.half": torch.ones(3, dtype=torch.bfloat16),
            "model.empty": torch.zeros(0, 4),
            "optimizer.weight.step": torch.tensor(float(step)),
            "random.cpu": torch.arange(5, dtype=torch.uint8),
        },
        {"step": step, "config": {"name": "x"}},
    )


def step_of(folder: Path) -> int:
    checkpoint = load_checkpoint(folder)
    assert checkpoint is not None
    return int(checkpoint.about["step"])


def test_round_trip_is_exact_and_without_pickle(tmp_path: Path) -> None:
    saved = example(3)
    save_checkpoint(tmp_path, saved)
    loaded = load_checkpoint(tmp_path)
    assert loaded is not None
    assert loaded.about == saved.about
    assert set(loaded.tensors) == set(saved.tensors)
    for name, tensor in saved.tensors.items():
        assert loaded.tensors[name].dtype == tensor.dtype
        assert torch.equal(loaded.tensors[name], tensor), name
    assert set(loaded.part("model.")) == {"weight", "tied", "half", "empty"}
    # any program that reads safetensors can read it
    with safe_open(tmp_path / CURRENT, framework="pt") as file:
        assert torch.equal(file.get_tensor("model.weight"), saved.tensors["model.weight"])


def test_the_newest_is_read_and_the_previous_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, example(step))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([CURRENT, PREVIOUS])
    assert step_of(tmp_path) == 3
    (tmp_path / CURRENT).unlink()
    assert step_of(tmp_path) == 2


def test_a_checkpoint_can_be_read_by_whom_other_files_can(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, example(1))
    (tmp_path / "other").touch()
    assert (tmp_path / CURRENT).stat().st_mode == (tmp_path / "other").stat().st_mode


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path) is None


def full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(("of", "where"), [(tensor_files, "save_file"), (module, "force_to_disk")])
def test_a_full_disk_leaves_the_older_ones_and_says_so(
    of: ModuleType, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, example(1))
    save_checkpoint(tmp_path, example(2))
    monkeypatch.setattr(of, where, full_disk)
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(tmp_path, example(3))
    message = str(caught.value)
    assert "No space left on device" in message and "untouched" in message and "\n" not in message
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([CURRENT, PREVIOUS])
    assert step_of(tmp_path) == 2


def test_a_write_that_the_system_refuses_leaves_the_older_ones(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, example(1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(CheckpointError, match="could not write") as caught:
            save_checkpoint(tmp_path, example(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == [CURRENT]
    assert step_of(tmp_path) == 1


@pytest.mark.parametrize("survived", [0, 1])
def test_a_stop_between_the_renames_leaves_a_usable_one(
    survived: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, example(1))
    save_checkpoint(tmp_path, example(2))
    done = []

    def killed(source: Path, target: Path) -> None:
        if len(done) == survived:
            raise KeyboardInterrupt
        done.append(source)
        source.rename(target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, example(3))
    monkeypatch.undo()
    assert step_of(tmp_path) == 2
    assert not partial_of(tmp_path / CURRENT).exists()
    # a process that is killed leaves what it was writing, and that is in nobody's way
    partial_of(tmp_path / CURRENT).write_text("half")
    save_checkpoint(tmp_path, example(4))
    assert step_of(tmp_path) == 4 and not partial_of(tmp_path / CURRENT).exists()


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 2 // 3)


def truncate_header(path: Path) -> None:
    os.truncate(path, 20)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flip_one_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 4
    path.write_bytes(content)


def replace_by_text(path: Path) -> None:
    path.write_text("not a checkpoint, but longer than eight bytes")


DAMAGES = [truncate, truncate_header, empty, flip_one_bit, replace_by_text]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_falls_back_with_one_warning(damage: object, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, example(1))
    save_checkpoint(tmp_path, example(2))
    damage(tmp_path / CURRENT)  # type: ignore[operator]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert step_of(tmp_path) == 1
    (warning,) = caught
    message = str(warning.message)
    assert CURRENT in message and PREVIOUS in message and "\n" not in message


@pytest.mark.parametrize("damage", DAMAGES)
def test_when_none_is_usable_the_error_is_one_line(damage: object, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, example(1))
    save_checkpoint(tmp_path, example(2))
    damage(tmp_path / CURRENT)  # type: ignore[operator]
    damage(tmp_path / PREVIOUS)  # type: ignore[operator]
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(tmp_path)
    message = str(caught.value)
    assert CURRENT in message and PREVIOUS in message and "\n" not in message


def test_a_safetensors_file_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(2)}, tmp_path / CURRENT)
    with pytest.raises(CheckpointError, match="not usable"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("failing", [False, True])
def test_the_write_after_a_damaged_one_keeps_the_one_that_was_good(
    failing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, example(1))
    save_checkpoint(tmp_path, example(2))
    truncate(tmp_path / "checkpoint.safetensors")
    with pytest.warns(UserWarning, match=r"continuing from checkpoint.previous.safetensors"):
        assert load_checkpoint(tmp_path, set_aside=True).about["step"] == 1
    if failing:
        replace = os.replace

        def fail_into_place(source: Path, target: Path) -> None:
            if target.name == "checkpoint.safetensors":
                full_disk()
            replace(source, target)

        monkeypatch.setattr(os, "replace", fail_into_place)
        with pytest.raises(
            CheckpointError, match=r"the earlier checkpoint.previous.safetensors is untouched"
        ):
            save_checkpoint(tmp_path, example(3))
        monkeypatch.undo()
    else:
        save_checkpoint(tmp_path, example(3))
    assert load_checkpoint(tmp_path).about["step"] == (1 if failing else 3)


def failing_replace(target: str, times: int) -> Callable[[Path, Path], None]:
    replace, left = os.replace, [times]

    def fail(source: Path, to: Path) -> None:
        if to.name == target and left[0]:
            left[0] -= 1
            full_disk()
        replace(source, to)

    return fail


# with the second failure the old one cannot be put back either
@pytest.mark.parametrize(("times", "kept"), [(1, CURRENT), (2, PREVIOUS)])
def test_a_failing_last_rename_keeps_the_newest_and_names_its_file(
    times: int, kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, example(1))
    save_checkpoint(tmp_path, example(2))
    monkeypatch.setattr(os, "replace", failing_replace(CURRENT, times))
    with pytest.raises(CheckpointError, match=f"; the earlier {kept} is untouched"):
        save_checkpoint(tmp_path, example(3))
    assert [path.name for path in tmp_path.iterdir()] == [kept]
    assert step_of(tmp_path) == 2


def test_a_folder_that_cannot_be_forced_to_disk_is_told_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, example(1))
    monkeypatch.setattr(files, "force_to_disk", lambda path: full_disk() if path == tmp_path else None)
    with pytest.raises(CheckpointError, match=f"; the earlier {PREVIOUS} is untouched"):
        save_checkpoint(tmp_path, example(2))
    (tmp_path / CURRENT).unlink()
    assert step_of(tmp_path) == 1


def test_a_folder_that_is_closed_while_writing_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, example(1))
    for name in ("touch", "stat", "unlink"):
        monkeypatch.setattr(Path, name, refuse)
    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(CheckpointError, match="Permission denied; existing files are untouched"):
        save_checkpoint(tmp_path, example(2))


def refuse(*_: object, **__: object) -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def test_a_checkpoint_that_cannot_be_opened_is_not_taken_for_none(tmp_path: Path) -> None:
    # a link to itself: even those who may do everything cannot open it
    (tmp_path / CURRENT).symlink_to(tmp_path / CURRENT)
    with pytest.raises(CheckpointError, match=f"{CURRENT} is not usable"):
        load_checkpoint(tmp_path)


def test_a_damaged_one_that_cannot_be_set_aside_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, example(1))
    save_checkpoint(tmp_path, example(2))
    truncate(tmp_path / CURRENT)
    monkeypatch.setattr(os, "replace", failing_replace(module.DAMAGED, 1))
    with pytest.raises(CheckpointError, match="cannot be renamed to") as caught:
        load_checkpoint(tmp_path, set_aside=True)
    assert "\n" not in str(caught.value)
    # those who only read change nothing
    with pytest.warns(UserWarning, match="continuing from"):
        assert step_of(tmp_path) == 1
    assert (tmp_path / CURRENT).exists()
