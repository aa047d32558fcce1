"""Atomic writes of files and folders that never follow a symbolic link, checksums, and locks of folders.

A run folder may come from a stranger and contain, say, `metrics.jsonl` as a link to one of the user's files.
So a file is written under a new temporary name, then renamed, which replaces the link. Files opened for
appending, and subfolders, are refused if they are links. JSON, weights and texts that are read from a folder
are refused if they are links that leave it, because their content may reach files that the user passes on.
The folder or the file that the user names may itself be a link.
"""

import contextlib
import errno
import json
import mmap
import os
import shutil
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from linrec.extras import import_extra

__all__ = [
    "LOCK",
    "FolderInUseError",
    "append_to",
    "checksum",
    "creating",
    "force_to_disk",
    "inside",
    "json_line",
    "locked",
    "make_subfolder",
    "mapped",
    "parse_json",
    "partial_of",
    "read_json",
    "reason",
    "replacing",
    "write_json",
    "write_text",
]

LOCK = ".lock"
CHECKSUM = "checksum"
# marks the value too, so that damage to the name cannot hide the checksum
ALGORITHM = "crc32:"
WRONG = "its checksum is wrong, so the file was damaged or edited"


class FolderInUseError(Exception):
    """Another process holds the lock of a folder.

    Args:
        process: "another process (pid 123)", or without the number if it is unknown.
    """

    def __init__(self, process: str) -> None:
        super().__init__(process)
        self.process = process


@contextlib.contextmanager
def replacing(path: Path, *, shared: bool = False) -> Iterator[Path]:
    """Yield the path of an empty file, and rename the file to `path` once it is written and on disk.

    After an error the temporary file is removed, and an existing file at `path` is untouched. A symbolic link
    at `path` is replaced; its target is not changed.

    Args:
        path: the file to write.
        shared: whether several processes may write the file at the same time; the last to finish wins.
    """
    partial = partial_of(path, f".{uuid.uuid4().hex}" if shared else "")
    try:
        # remove the leftover of a killed process, or a link
        partial.unlink(missing_ok=True)
        # O_EXCL follows no links
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        mode = os.fstat(descriptor).st_mode
        os.close(descriptor)
        yield partial
        # safetensors makes files that only their owner can read
        partial.chmod(mode)
        force_to_disk(partial)
        os.replace(partial, path)
        force_to_disk(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def creating(folder: Path) -> Iterator[Path]:
    """Yield the path of an empty folder, and rename it to `folder` once its files are written and on disk.

    After an error the temporary folder is removed.

    Args:
        folder: the folder to create, with the folders above it; it must not exist.
    """
    partial = partial_of(folder)
    try:
        # the leftover of a killed process
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        for path in (*partial.rglob("*"), partial):
            if path.is_file():
                # safetensors makes files that only their owner can read
                path.chmod(partial.stat().st_mode & 0o666)
            force_to_disk(path)
        partial.rename(folder)
        force_to_disk(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def partial_of(path: Path, tag: str = "") -> Path:
    """Return the temporary name under which a file or a folder is written."""
    return path.with_name(f"{path.name}{tag}.partial")


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8 atomically; see `replacing`."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def checksum(*parts: bytes | memoryview) -> str:
    """Return the checksum of bytes in parts, as files store it; it changes with every bit."""
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return f"{ALGORITHM}{crc:08x}"


@contextlib.contextmanager
def mapped(path: Path) -> Iterator[memoryview]:
    """Yield the bytes of a file, which are read when they are taken."""
    with path.open("rb") as file:
        # an empty file cannot be mapped
        if not os.fstat(file.fileno()).st_size:
            yield memoryview(b"")
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content, memoryview(content) as view:
            yield view


def json_line(content: Mapping[str, Any], *, separators: tuple[str, str] | None = None) -> str:
    """Return a JSON object as a line, with its checksum as the last member; `parse_json` verifies it.

    Args:
        content: the object, without a member `checksum`.
        separators: see `json.dumps`.
    """
    return json.dumps(_sealed(content), separators=separators) + "\n"


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object atomically, with its checksum as the last member; `read_json` verifies it."""
    write_text(path, json.dumps(_sealed(content), indent=2) + "\n")


def append_to(path: Path) -> TextIO:
    """Open a text file in UTF-8 for appending, and create it if it does not exist."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _is_link(path) from error
        raise
    return os.fdopen(descriptor, "a", encoding="utf-8")


def make_subfolder(folder: Path, name: str | os.PathLike[str]) -> Path:
    """Create a folder below another, with the folders between them, and return its path.

    Args:
        folder: created if it does not exist; may be a symbolic link.
        name: relative path below `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for part in Path(name).parts:
        folder = folder / part
        if folder.is_symlink():
            raise _is_link(folder)
        folder.mkdir(exist_ok=True)
    return folder


def inside(path: Path, folder: Path | None = None) -> Path:
    """Return the path of a file in a folder; refuse a symbolic link that leaves the folder.

    In the cache of the Hugging Face hub, the files of a snapshot are links to blobs beside the snapshots.

    Args:
        path: the file; it need not exist.
        folder: the folder; None is the folder directly above the file.
    """
    folder = Path(os.path.realpath(path.parent if folder is None else folder))
    allowed = [folder, *([folder.parents[1] / "blobs"] if folder.parent.name == "snapshots" else [])]
    target = Path(os.path.realpath(path))
    if not any(target.is_relative_to(place) for place in allowed):
        raise OSError(
            errno.ELOOP, "is a symbolic link that leaves its folder; put the file itself there", str(path)
        )
    return path


def read_json(path: Path, *, object_hook: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """Return the content of a JSON file of a folder, and verify the checksum that `write_json` wrote.

    The checksum does not count if the file has lost its last newline. Damage makes such a file invalid, but
    programs that edit it with `json.dumps` leave the newline out.

    Args:
        path: the file.
        object_hook: replaces each object; see `json.loads`.
    """
    content = inside(path).read_bytes()
    return parse_json(content, object_hook=object_hook, verify=content.endswith(b"\n"))


def parse_json(
    text: str | bytes, *, object_hook: Callable[[dict[str, Any]], Any] | None = None, verify: bool = True
) -> Any:
    """Return the content of a JSON string without its checksum.

    Args:
        text: the string.
        object_hook: replaces each object; see `json.loads`.
        verify: whether to verify the checksum of an object that has one.
    """
    try:
        decoded = text if isinstance(text, str) else text.decode()
        content = json.loads(decoded, object_hook=object_hook)
        if not isinstance(content, dict) or not content:
            return content
        name, stored = content.popitem()
        if name != CHECKSUM and not (isinstance(stored, str) and stored.startswith(ALGORITHM)):
            return {**content, name: stored}
        if verify and {name: stored} != {CHECKSUM: _json_checksum(content)}:
            raise ValueError(f"{WRONG}; restore it, or remove its `{CHECKSUM}` if you edited it yourself")
        return content
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{error}; restore it") from error


@contextlib.contextmanager
def locked(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock of a folder; the operating system releases it when the process dies.

    Args:
        folder: the folder to lock; its file `.lock` contains the process id.
        wait: whether to wait for another process to release the lock.
    """
    path = folder / LOCK
    # some versions of filelock follow links, or truncate the file of the process that holds the lock
    if path.is_symlink():
        raise _is_link(path)
    try:
        holder = f" (pid {int(path.read_bytes())})"
    except (OSError, ValueError):
        holder = ""
    filelock = import_extra("filelock", "the lock of a folder")
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=-1 if wait else 0)
    except filelock.Timeout:
        raise FolderInUseError(f"another process{holder}") from None
    try:
        path.write_text(f"{os.getpid()}\n")
        yield
    finally:
        lock.release()


def force_to_disk(path: Path) -> None:
    """Wait until a file, or a folder's list of entries, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reason(error: Exception) -> str:
    """Return the operating system's message without number and path, or the message of any other error."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    # as it will be read: names become strings
    plain = json.loads(json.dumps(content))
    return {**plain, CHECKSUM: _json_checksum(plain)}


def _json_checksum(content: Mapping[str, Any]) -> str:
    return checksum(json.dumps(content, sort_keys=True).encode())


def _is_link(path: Path) -> OSError:
    return OSError(errno.ELOOP, "is a symbolic link, which is not followed; remove it", str(path))
