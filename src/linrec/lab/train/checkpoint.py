"""Checkpoints: safetensors files that are written atomically, with a fallback to the previous checkpoint.

- `checkpoint.safetensors`: the newest checkpoint;
- `checkpoint.previous.safetensors`: the checkpoint before it;
- `checkpoint.damaged.safetensors`: an unreadable newest checkpoint, renamed when the run was resumed;
- `best.safetensors`: weights of the model with the lowest validation loss, if the run keeps this model.

Every file is written with `linrec.files.replacing`. Loading verifies a checksum of the whole file, and falls
back to the previous checkpoint. Nothing is ever unpickled.
"""

import contextlib
import os
import warnings
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from linrec.errors import CheckpointError
from linrec.files import force_to_disk, inside, reason, replacing
from linrec.tensor_files import UNREADABLE, read_tensors, write_tensors

CURRENT = "checkpoint.safetensors"
PREVIOUS = "checkpoint.previous.safetensors"
DAMAGED = "checkpoint.damaged.safetensors"
BEST = "best.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint file.

    Args:
        tensors: all tensors by name, with the prefixes "model.", "optimizer.", "random.", "metrics." and
            "carried.".
        about: everything else, as JSON values: step, position in the data, configuration, versions.
    """

    tensors: Mapping[str, Tensor]
    about: Mapping[str, Any]

    def part(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors whose names have a prefix, by their names without the prefix."""
        return {name[len(prefix) :]: t for name, t in self.tensors.items() if name.startswith(prefix)}


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint; the newest checkpoint before it becomes the previous checkpoint.

    The folder holds a usable checkpoint at all times, even if writing is interrupted.

    Args:
        folder: the run folder.
        checkpoint: the checkpoint to write; tensors may be on any device and may share memory.

    Raises:
        CheckpointError: the file could not be written, for example because the disk is full. The earlier
            checkpoint is untouched, in the file that the message names.
    """
    current, previous = folder / CURRENT, folder / PREVIOUS
    moved = False
    try:
        with replacing(current) as partial:
            _write(partial, checkpoint)
            # flush the new checkpoint to disk before the newest is renamed
            force_to_disk(partial)
            # the file is missing before the first checkpoint, and after a damaged checkpoint was set aside
            with contextlib.suppress(FileNotFoundError):
                os.replace(current, previous)
            moved = True
    except OSError as error:
        # files that may hold the newest earlier checkpoint
        older = [PREVIOUS] if moved and os.path.exists(current) else [CURRENT, PREVIOUS]
        if moved and not os.path.exists(current):
            with contextlib.suppress(OSError):
                os.replace(previous, current)
        left = _what_is_left(folder, older)
        raise CheckpointError(f"could not write {current}: {reason(error)}; {left}.") from error


def save_best(folder: Path, checkpoint: Checkpoint) -> None:
    """Write the best model so far, atomically replacing the best model before it.

    Args:
        folder: the run folder.
        checkpoint: weights, "step" and "loss".

    Raises:
        CheckpointError: the file could not be written; the earlier file is untouched.
    """
    best = folder / BEST
    try:
        with replacing(best) as partial:
            _write(partial, checkpoint)
    except OSError as error:
        left = _what_is_left(folder, [BEST])
        raise CheckpointError(f"could not write {best}: {reason(error)}; {left}.") from error


def load_best(folder: Path) -> Checkpoint | None:
    """Return the best model of a run folder, or None if the folder has no best model.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = folder / BEST
    try:
        return _read(path)
    except FileNotFoundError:
        return None
    except UNREADABLE as error:
        raise CheckpointError(
            f"{path} is not usable ({reason(error)}); delete it to use the newest checkpoint instead."
        ) from error


def load_checkpoint(folder: Path, *, set_aside: bool = False) -> Checkpoint | None:
    """Read the newest usable checkpoint of a run folder.

    Falls back to the previous checkpoint, with a warning, if the newest is damaged.

    Args:
        folder: the run folder.
        set_aside: rename a damaged newest checkpoint. Otherwise, the next `save_checkpoint` would overwrite
            the usable previous checkpoint with the damaged file. Pass True when resuming a run.

    Returns:
        The checkpoint, with its tensors on the CPU; None if the folder has no checkpoint.

    Raises:
        CheckpointError: no checkpoint in the folder is usable, or the damaged checkpoint cannot be renamed.
    """
    failures = []
    for path in (folder / CURRENT, folder / PREVIOUS):
        try:
            checkpoint = _read(path)
        except FileNotFoundError:
            continue
        except UNREADABLE as error:
            failures.append(f"{path} is not usable ({reason(error)})")
            continue
        if failures:
            if set_aside:
                _set_aside(folder)
            warnings.warn(f"{failures[0]}; continuing from {path.name}.", stacklevel=2)
        return checkpoint
    if failures:
        raise CheckpointError(f"{' and '.join(failures)}; start again with another --out.")
    return None


def check_weights(checkpoint: Checkpoint, model: nn.Module, folder: Path) -> None:
    """Check that the weights in a checkpoint match a model.

    Args:
        checkpoint: the checkpoint.
        model: the model of the run's configuration.
        folder: the run folder, for the message.

    Raises:
        CheckpointError: a tensor is missing, unexpected, or of another shape.
    """
    stored = {name: tuple(tensor.shape) for name, tensor in checkpoint.part("model.").items()}
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name in [*wanted, *stored]:
        if stored.get(name) != wanted.get(name):
            has = f"the shape {stored[name]}" if name in stored else "no such tensor"
            needs = f"the shape {wanted[name]}" if name in wanted else "no such tensor"
            raise CheckpointError(
                f"the weights in {folder} do not match its config.json: for `{name}`, the checkpoint has "
                f"{has} and the configuration needs {needs}. Use the files of a single run."
            )


def check_state(
    checkpoint: Checkpoint, folder: Path, moments: Mapping[str, Set[str]], total_steps: int
) -> None:
    """Check that a run can resume from a checkpoint; the best model's file, for example, has weights only.

    Args:
        checkpoint: the checkpoint.
        folder: the run folder, for the message.
        moments: names of the optimiser's state tensors, by parameter name.
        total_steps: steps of the whole run.

    Raises:
        CheckpointError: a value is missing, the optimiser differs, or the checkpoint has more steps than the
            run.
    """
    absent = [name for name in ("step", "seconds", "python_random") if name not in checkpoint.about]
    absent += [name for name in ("metrics.window",) if name not in checkpoint.tensors]
    if absent:
        raise CheckpointError(
            f"the checkpoint in {folder} cannot be resumed: it has no {', '.join(absent)}. Start a new run "
            "with --out."
        )
    if checkpoint.about["step"] > total_steps:
        raise CheckpointError(
            f"the checkpoint in {folder} is of step {checkpoint.about['step']}, and its configuration has "
            f"{total_steps} steps in total: pass more epochs or steps."
        )
    for name, wanted in moments.items():
        # a parameter that has not yet received a gradient has no optimiser state
        stored = checkpoint.part(f"optimizer.{name}.").keys()
        if stored and stored != wanted:
            raise CheckpointError(
                f"the optimiser state in {folder} does not match its config.json: for `{name}`, the "
                f"checkpoint has {', '.join(sorted(stored))} and the configuration needs "
                f"{', '.join(sorted(wanted))}. Use the files of a single run."
            )


def _set_aside(folder: Path) -> None:
    try:
        os.replace(folder / CURRENT, folder / DAMAGED)
    except OSError as error:
        raise CheckpointError(
            f"{folder / CURRENT} is not usable, and cannot be renamed to {DAMAGED}: {reason(error)}; "
            "rename it and resume again."
        ) from error


def _what_is_left(folder: Path, older: Sequence[str]) -> str:
    try:
        there = os.listdir(folder)
    except OSError:
        return "existing files are untouched"
    kept = next((name for name in older if name in there), None)
    return f"the earlier {kept} is untouched" if kept else "there is no earlier checkpoint"


def _write(path: Path, checkpoint: Checkpoint) -> None:
    # copies, because safetensors refuses tensors that share memory, such as tied weights
    tensors = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in checkpoint.tensors.items()}
    write_tensors(path, tensors, checkpoint.about)


def _read(path: Path) -> Checkpoint:
    return Checkpoint(*read_tensors(inside(path)))
