"""Checkpoints: one safetensors file that is either whole or not there, and the one before it.

    checkpoint.safetensors           the newest
    checkpoint.previous.safetensors  the one before
    checkpoint.damaged.safetensors   a newest one that a resumed run could not read, set aside
    best.safetensors                 weights alone: the model of the lowest validation loss, where it is kept

Each is written by `linrec.files.replacing`. Loading checks the file's length and the
checksum of its tensors, and falls back to the previous one. Nothing is ever unpickled.
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
from linrec.files import force_to_disk, reason, replacing
from linrec.tensor_files import UNREADABLE, UNWRITABLE, read_tensors, write_tensors

CURRENT = "checkpoint.safetensors"
PREVIOUS = "checkpoint.previous.safetensors"
DAMAGED = "checkpoint.damaged.safetensors"
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
    current, previous = folder / CURRENT, folder / PREVIOUS
    moved = False
    try:
        with replacing(current) as partial:
            _write(partial, checkpoint)
            # before the newest is moved
            force_to_disk(partial)
            # none there: this is the first, or the newest was set aside
            with contextlib.suppress(FileNotFoundError):
                os.replace(current, previous)
            moved = True
    except UNWRITABLE as error:
        # where the newest from before is
        older = [PREVIOUS] if moved and os.path.exists(current) else [CURRENT, PREVIOUS]
        if moved and not os.path.exists(current):
            with contextlib.suppress(OSError):
                os.replace(previous, current)
        left = _what_is_left(folder, older)
        raise CheckpointError(f"could not write {current}: {reason(error)}; {left}.") from error


def save_best(folder: Path, checkpoint: Checkpoint) -> None:
    """Write the best model so far; the one before it is there until this one is.

    Args:
        folder: the run folder.
        checkpoint: weights, "step" and "loss".

    Raises:
        CheckpointError: the file could not be written; the one before is untouched.
    """
    best = folder / BEST
    try:
        with replacing(best) as partial:
            _write(partial, checkpoint)
    except UNWRITABLE as error:
        left = _what_is_left(folder, [BEST])
        raise CheckpointError(f"could not write {best}: {reason(error)}; {left}.") from error


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
    except UNREADABLE as error:
        raise CheckpointError(
            f"{path} is not usable ({reason(error)}); without it, the newest checkpoint is taken."
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
        except UNREADABLE as error:
            failures.append(f"{path} is not usable ({reason(error)})")
            continue
        if failures:
            if set_aside:
                _set_aside(folder)
            warnings.warn(f"{failures[0]}; going on from {path.name}.", stacklevel=2)
        return checkpoint
    if failures:
        raise CheckpointError(f"{' and '.join(failures)}; start again with another --out.")
    return None


def check_weights(checkpoint: Checkpoint, model: nn.Module, folder: Path) -> None:
    """Refuse the weights of a model of another configuration.

    Args:
        checkpoint: the checkpoint.
        model: the model that the configuration describes.
        folder: the run folder, for the message.

    Raises:
        CheckpointError: a tensor is missing, has no place in the model, or has another shape.
    """
    stored = {name: tuple(tensor.shape) for name, tensor in checkpoint.part("model.").items()}
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name in [*wanted, *stored]:
        if stored.get(name) != wanted.get(name):
            has = f"the shape {stored[name]}" if name in stored else "no such tensor"
            needs = f"the shape {wanted[name]}" if name in wanted else "no such tensor"
            raise CheckpointError(
                f"the weights in {folder} are of another configuration than its config.json: `{name}` has "
                f"{has}, and the configuration needs {needs}. Put the files of one run together."
            )


def check_state(
    checkpoint: Checkpoint, folder: Path, moments: Mapping[str, Set[str]], total_steps: int
) -> None:
    """Refuse a checkpoint that the run of a configuration cannot go on from, such as the best model's.

    Args:
        checkpoint: the checkpoint.
        folder: the run folder, for the message.
        moments: names of what the optimiser keeps, by parameter.
        total_steps: steps of the whole run.

    Raises:
        CheckpointError: something is missing, of another optimiser, or of more steps than the run has.
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
            f"the checkpoint in {folder} has made {checkpoint.about['step']} steps, and the run of its "
            f"configuration has {total_steps}: ask for more epochs or steps."
        )
    for name, wanted in moments.items():
        # a parameter without a gradient so far has no moments
        stored = checkpoint.part(f"optimizer.{name}.").keys()
        if stored and stored != wanted:
            raise CheckpointError(
                f"the checkpoint in {folder} is of another optimiser than its config.json: `{name}` has "
                f"{', '.join(sorted(stored))}, and the configuration needs {', '.join(sorted(wanted))}. "
                "Put the files of one run together."
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
        return "what was there is untouched"
    kept = next((name for name in older if name in there), None)
    return f"{kept} from before is untouched" if kept else "there is no older one"


def _write(path: Path, checkpoint: Checkpoint) -> None:
    # copies: safetensors refuses tensors that share memory, and tied weights do
    tensors = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in checkpoint.tensors.items()}
    write_tensors(path, tensors, checkpoint.about)


def _read(path: Path) -> Checkpoint:
    return Checkpoint(*read_tensors(path))
