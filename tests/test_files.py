import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from linrec import files
from linrec.files import (
    LOCK,
    FolderInUseError,
    append_to,
    creating,
    locked,
    make_subfolder,
    parse_json,
    partial_of,
    replacing,
    write_text,
)


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    path = tmp_path / "precious"
    path.write_text("mine")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir()
    return folder


def test_a_link_is_replaced_and_never_written_through(precious: Path, folder: Path) -> None:
    path = folder / "file"
    path.symlink_to(precious)
    partial_of(path).symlink_to(precious)
    write_text(path, "new")
    assert path.read_text() == "new" and not path.is_symlink()
    assert precious.read_text() == "mine"
    assert os.listdir(folder) == ["file"]


def test_appending_refuses_a_link(precious: Path, folder: Path) -> None:
    (folder / "log").symlink_to(precious)
    with pytest.raises(OSError, match="is a symbolic link, which is not followed"):
        append_to(folder / "log")
    assert precious.read_text() == "mine"
    with append_to(folder / "other") as log:
        log.write("one\n")
    with append_to(folder / "other") as log:
        log.write("two\n")
    assert (folder / "other").read_text() == "one\ntwo\n"


def test_folders_inside_are_no_links_and_the_outer_one_may_be(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    assert make_subfolder(tmp_path / "link", Path("a/b")).is_dir()
    assert (folder / "a/b").is_dir()
    (folder / "c").symlink_to(tmp_path)
    with pytest.raises(OSError, match="is a symbolic link"):
        make_subfolder(folder, "c/d")
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_the_old_file_alone(error: BaseException, folder: Path) -> None:
    path = folder / "file"
    path.write_text("old")
    with pytest.raises(type(error)), replacing(path) as partial:
        partial.write_text("half")
        raise error
    assert path.read_text() == "old" and os.listdir(folder) == ["file"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_a_folder_appears_whole_or_not_at_all(error: BaseException, folder: Path) -> None:
    path = folder / "above" / "new"
    with pytest.raises(type(error)), creating(path) as partial:
        (partial / "inside").mkdir()
        (partial / "inside" / "file").touch()
        raise error
    assert os.listdir(folder / "above") == []
    # the leftover of a killed process
    partial_of(path).mkdir()
    (partial_of(path) / "old").touch()
    with creating(path) as partial:
        (partial / "inside").mkdir()
        (partial / "inside" / "file").write_text("x")
        assert not path.exists()
    assert os.listdir(folder / "above") == ["new"] and os.listdir(path) == ["inside"]
    with pytest.raises(OSError, match="not empty"), creating(path):
        pass
    assert os.listdir(folder / "above") == ["new"]


def test_files_have_the_mode_of_others_and_shared_writers_do_not_meet(folder: Path) -> None:
    path = folder / "file"
    with replacing(path, shared=True) as one, replacing(path, shared=True) as other:
        one.write_text("one")
        other.write_text("other")
        # as safetensors does
        one.chmod(0o600)
    assert path.read_text() == "one" and os.listdir(folder) == ["file"]
    (folder / "plain").touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((folder / "plain").stat().st_mode)


def test_a_file_is_on_disk_before_it_has_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = []
    force, replace = files.force_to_disk, os.replace
    monkeypatch.setattr(files, "force_to_disk", lambda path: (done.append(path.name), force(path)))
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append("rename"), replace(a, b)))
    write_text(folder / "file", "x")
    assert done == ["file.partial", "rename", "folder"]


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000])
def test_deep_json_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(text)


HOLD = """
import sys, time
from pathlib import Path
from linrec.files import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_another_process_is_named_and_a_killed_one_blocks_nobody(folder: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        for _ in range(2):
            with (
                pytest.raises(FolderInUseError, match=rf"another process \(pid {process.pid}\)"),
                locked(folder),
            ):
                pass
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    with locked(folder):
        assert int((folder / LOCK).read_text()) == os.getpid()


def test_a_lock_is_no_link(precious: Path, folder: Path) -> None:
    (folder / LOCK).symlink_to(precious)
    with pytest.raises(OSError, match="is a symbolic link"), locked(folder):
        pass
    assert precious.read_text() == "mine"
