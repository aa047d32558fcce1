"""Checkpoints: one safetensors file that is either whole or not there, and the one before it.

    checkpoint.safetensors           the newest
    checkpoint.previous.safetensors  the one before
    checkpoint.damaged.safetensors   a newest one that a resumed run could not read, set aside
    best.safetensors                 weights alone: the model of the lowest validation loss, where it is kept
    checkpoint.partial               being written; a leftover of an interrupted write, never read

A file is written under the last name, forced to disk, and renamed. Loading checks the file's length and the
checksum of its tensors, and falls back to the previous one. Nothing is ever unpickled.
"""

import contextlib
import json
import os
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from linrec.train.errors import CheckpointError

CURRENT = "checkpoint.safetensors"
PREVIOUS = "checkpoint.previous.safetensors"
DAMAGED = "checkpoint.damaged.safetensors"
PARTIAL = "checkpoint.partial"
BEST = "best.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint file holds.

    Args:
        tensors: all tensors by name: "model.", "optimizer.", "random." and "metrics." and what follows.
        about: everything else, as JSON holds it: step, position in the data, configuration, versions.
    """

    tensors: Mapping[str, Tensor]
    about: Mapping[str, Any]

    def part(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors under a prefix, by their names without it."""
        return {name[len(prefix) :]: t for name, t in self.tensors.items() if name.startswith(prefix)}


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint; the newest before it becomes the previous one.

    At no time is there no usable checkpoint in the folder, wherever the writing stops.

    Args:
        folder: the run folder.
        checkpoint: what to write; tensors may be on any device and may share memory.

    Raises:
        CheckpointError: the file could not be written (a full disk, say); the newest before it is untouched,
            in the file that the message names.
    """
    partial, current, previous = folder / PARTIAL, folder / CURRENT, folder / PREVIOUS
    # where the newest from before is, should anything fail
    older = [CURRENT, PREVIOUS]
    try:
        _write(partial, checkpoint)
        # none there: this is the first, or the newest was set aside
        with contextlib.suppress(FileNotFoundError):
            os.replace(current, previous)
        try:
            os.replace(partial, current)
        except OSError:
            with contextlib.suppress(OSError):
                os.replace(previous, current)
            raise
        older = [PREVIOUS]
        _force_to_disk(folder)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        left = _what_is_left(folder, older)
        raise CheckpointError(f"could not write {current}: {_reason(error)}; {left}.") from error


def save_best(folder: Path, checkpoint: Checkpoint) -> None:
    """Write the best model so far; the one before it is there until this one is.

    Args:
        folder: the run folder.
        checkpoint: weights, "step" and "loss".

    Raises:
        CheckpointError: the file could not be written; the one before is untouched.
    """
    partial, best = folder / PARTIAL, folder / BEST
    try:
        _write(partial, checkpoint)
        os.replace(partial, best)
        _force_to_disk(folder)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        left = _what_is_left(folder, [BEST])
        raise CheckpointError(f"could not write {best}: {_reason(error)}; {left}.") from error


def load_best(folder: Path) -> Checkpoint | None:
    """Read the best model of a run folder; None where none was kept.

    Raises:
        CheckpointError: it is damaged.
    """
    path = folder / BEST
    try:
        return _read(path)
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path} is not usable ({_reason(error)}); without it, the newest checkpoint is taken."
        ) from error


def load_checkpoint(folder: Path, *, set_aside: bool = False) -> Checkpoint | None:
    """Read the newest usable checkpoint of a run folder.

    Falls back to the previous checkpoint with one warning when the newest is damaged.

    Args:
        folder: the run folder.
        set_aside: rename a newest checkpoint that is damaged, so that the next one that is written does not
            push out the usable one in its favour. For those who write into the folder.

    Returns:
        The checkpoint, its tensors on the CPU; None when the folder has none.

    Raises:
        CheckpointError: there are checkpoints, and none is usable; or the damaged one cannot be renamed.
    """
    failures = []
    for path in (folder / CURRENT, folder / PREVIOUS):
        try:
            checkpoint = _read(path)
        except FileNotFoundError:
            continue
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            failures.append(f"{path} is not usable ({_reason(error)})")
            continue
        if failures:
            if set_aside:
                _set_aside(folder)
            warnings.warn(f"{failures[0]}; going on from {path.name}.", stacklevel=2)
        return checkpoint
    if failures:
        raise CheckpointError(f"{' and '.join(failures)}; start again with another --out.")
    return None


def _set_aside(folder: Path) -> None:
    try:
        os.replace(folder / CURRENT, folder / DAMAGED)
    except OSError as error:
        raise CheckpointError(
            f"{folder / CURRENT} is not usable, and cannot be renamed to {DAMAGED}: {_reason(error)}; "
            "rename it and resume again."
        ) from error


def _what_is_left(folder: Path, older: Sequence[str]) -> str:
    try:
        there = os.listdir(folder)
    except OSError:
        return "what was there is untouched"
    kept = next((name for name in older if name in there), None)
    return f"{kept} from before is untouched" if kept else "there is no older one"


def _write(path: Path, checkpoint: Checkpoint) -> None:
    # copies: safetensors refuses tensors that share memory, and tied weights do
    tensors = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in checkpoint.tensors.items()}
    metadata = {"linrec": json.dumps(checkpoint.about), "crc32": _checksum(tensors)}
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata=metadata)
    # safetensors makes files that their owner alone can read
    path.chmod(mode)
    _force_to_disk(path)


def _read(path: Path) -> Checkpoint:
    # safetensors says of every file that it cannot open that it is not there
    path.open("rb").close()
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    about = json.loads(metadata["linrec"])
    if metadata["crc32"] != _checksum(tensors):
        raise ValueError("its checksum is wrong")
    return Checkpoint(tensors, about)


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    crc = 0
    for name in sorted(tensors):
        # flattened first: a scalar cannot be viewed as bytes
        crc = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, crc)
    return f"{crc:08x}"


def _force_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: Exception) -> str:
    # the system's words without the number and the path, which the message gives already
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
