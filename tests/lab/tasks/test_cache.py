import errno
import os
import warnings

import pytest
import torch
from safetensors.torch import save_file

import linrec.files
from linrec import tensor_files
from linrec.lab.tasks.files import _warn_once, kept

ABOUT = {"task": "Dice", "version": 1, "fields": {"sides": 6, "cache": None, "sizes": (1, 2)}}


class Dice:
    """Draws other numbers at every call, and counts them."""

    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return {"x": torch.full((3,), self.calls), "y": torch.arange(4, dtype=torch.uint8).view(2, 2)}


@pytest.fixture
def dice():
    return Dice()


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_was_drawn_is_found_again_and_nothing_else(dice, tmp_path):
    first = kept("dice", ABOUT, dice, cache=tmp_path / "deep" / "er")
    again = kept("dice", ABOUT, dice, cache=tmp_path / "deep" / "er")
    assert dice.calls == 1 and list(again) == ["x", "y"]
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert again["y"].dtype == torch.uint8
    # another version, other fields, another folder: each is drawn
    kept("dice", ABOUT | {"version": 2}, dice, cache=tmp_path)
    kept("dice", ABOUT | {"fields": {"sides": 8}}, dice, cache=tmp_path)
    assert kept("dice", ABOUT, dice, cache=tmp_path)["x"].tolist() == [4, 4, 4]
    assert dice.calls == 4 and len(files(tmp_path)) == 4


def test_the_folder_is_the_users_for_caches(dice, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept("dice", ABOUT, dice)
    (name,) = files(tmp_path / "linrec" / "tasks")
    assert name.startswith("dice-") and name.endswith(".safetensors")


def cut(path):
    path.write_bytes(path.read_bytes()[:-3])


def flipped(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def emptied(path):
    path.write_bytes(b"")


def foreign(path):
    save_file({"x": torch.zeros(3)}, path)


def of_other_content(path):
    tensor_files.write_tensors(path, {"x": torch.zeros(3)}, {"task": "Coin"})


@pytest.mark.parametrize("spoil", [cut, flipped, emptied, foreign, of_other_content])
def test_a_damaged_or_foreign_file_is_made_again(spoil, dice, tmp_path):
    kept("dice", ABOUT, dice, cache=tmp_path)
    (path,) = tmp_path.iterdir()
    spoil(path)
    with pytest.warns(
        UserWarning, match=r"dice-\w+\.safetensors is not usable \(.+\); it is generated again"
    ):
        assert kept("dice", ABOUT, dice, cache=tmp_path)["x"].tolist() == [2, 2, 2]
    assert kept("dice", ABOUT, dice, cache=tmp_path)["x"].tolist() == [2, 2, 2]
    assert files(tmp_path) == [path.name]


@pytest.mark.parametrize(("of", "where"), [(tensor_files, "save_file"), (linrec.files, "force_to_disk")])
def test_a_full_disk_is_told_once_and_nothing_is_left(of, where, dice, tmp_path, monkeypatch):
    def full_disk(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(of, where, full_disk)
    _warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for version in (1, 2):
            drawn = kept("dice", ABOUT | {"version": version}, dice, cache=tmp_path)
            assert drawn["x"].tolist() == [version] * 3
    (warning,) = caught
    assert f"cannot be cached in {tmp_path} (No space left on device)" in str(warning.message)
    assert "--task.cache" in str(warning.message)
    assert files(tmp_path) == []
    # with room again, all is as ever
    monkeypatch.undo()
    assert kept("dice", ABOUT, dice, cache=tmp_path)["x"].tolist() == [3, 3, 3]
    assert kept("dice", ABOUT, dice, cache=tmp_path)["x"].tolist() == [3, 3, 3]


def test_a_folder_that_is_a_file_is_told(dice, tmp_path):
    (tmp_path / "file").touch()
    _warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="cannot be cached in .*file/tasks"):
        assert kept("dice", ABOUT, dice, cache=tmp_path / "file" / "tasks")["x"].tolist() == [1, 1, 1]


def test_writing_that_is_interrupted_leaves_no_file(dice, tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        kept("dice", ABOUT, dice, cache=tmp_path)
    monkeypatch.undo()
    assert files(tmp_path) == []
    assert kept("dice", ABOUT, dice, cache=tmp_path)["x"].tolist() == [2, 2, 2]
