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
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from linrec.errors import CheckpointError
from linrec.files import force_to_disk, inside, reason, replacing
from linrec.generation.state import filled, named
from linrec.lab.train.fabric import Fabric, gathered, placed_like, whole
from linrec.lab.train.optim import Muon
from linrec.tensor_files import UNREADABLE, read_tensors, write_tensors
from linrec.trees import Tree, map_tree

CURRENT = "checkpoint.safetensors"
PREVIOUS = "checkpoint.previous.safetensors"
DAMAGED = "checkpoint.damaged.safetensors"
BEST = "best.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint file.

    Args:
        tensors: all tensors by name, with the prefixes "model.", "optimizer.", "random.", "metrics.",
            "carried." and "learner.".
        about: everything else, as JSON values: step, position in the data, configuration, versions.
    """

    tensors: Mapping[str, Tensor]
    about: Mapping[str, Any]

    def part(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors whose names have a prefix, by their names without the prefix."""
        return {name[len(prefix) :]: t for name, t in self.tensors.items() if name.startswith(prefix)}


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint; the newest checkpoint before it becomes the previous checkpoint.

    The folder holds a usable checkpoint at all times, even if writing is interrupted. Tensors may be on any
    device and may share memory.
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
    """Write the best model so far, weights with "step" and "loss", in place of the best model before it."""
    best = folder / BEST
    try:
        with replacing(best) as partial:
            _write(partial, checkpoint)
    except OSError as error:
        left = _what_is_left(folder, [BEST])
        raise CheckpointError(f"could not write {best}: {reason(error)}; {left}.") from error


def load_best(folder: Path) -> Checkpoint | None:
    """Return the best model of a run folder, or None if the folder has no best model."""
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
    """Return the newest usable checkpoint of a run folder, on the CPU; None if the folder has no checkpoint.

    Falls back to the previous checkpoint, with a warning, if the newest is damaged. Pass `set_aside` when
    resuming a run, to rename the damaged file: otherwise, the next `save_checkpoint` would overwrite the
    usable previous checkpoint with it.
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
    """Raise CheckpointError unless the weights of a checkpoint have the names and the shapes of a model."""
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
    checkpoint: Checkpoint,
    folder: Path,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    total_steps: int,
) -> None:
    """Raise CheckpointError unless a run can resume from a checkpoint; the best model's has weights only."""
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
    owners = _owners(optimizers)
    for name, parameter in model.named_parameters():
        muon = isinstance(owners[parameter], Muon)
        wanted = {"momentum"} if muon else {"step", "exp_avg", "exp_avg_sq"}
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


def gather_state(
    fabric: Fabric,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    window: Tensor,
    about: Mapping[str, Any],
    carried: Tree = None,
    learner: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Return the complete state of a run in the first process; all processes must call this.

    | name of a tensor | content |
    |---|---|
    | model.NAME | a parameter or buffer |
    | optimizer.NAME.MOMENT | a tensor of the optimiser's state of a parameter |
    | metrics.window | sums of the metrics since the last log entry |
    | carried.NAME | a part of the state that the next batch begins with |
    | learner.NUMBER | a tensor of the learner's memory, which `packed` splits from `about` |
    | random.DEVICE, random.DEVICE.RANK | random states of the first process, and of each other |
    """
    parts = _weights(model)
    owners = _owners(optimizers)
    for name, parameter in model.named_parameters():
        for moment, tensor in owners[parameter].state[parameter].items():
            parts[f"optimizer.{name}.{moment}"] = tensor
    parts["metrics.window"] = window
    parts |= named(carried, "carried")
    if learner is not None:
        of_learner: dict[str, Tensor] = {}
        about = {**about, "learner": packed(learner, of_learner)}
        parts |= {f"learner.{name}": tensor for name, tensor in of_learner.items()}
    tensors = _gathered_parts(fabric, parts)
    for kind, (get_random, _) in _random_states(fabric.device).items():
        for rank, state in enumerate(gathered(fabric, get_random())):
            tensors[_random_name(kind, rank)] = state
    return Checkpoint(tensors, {**about, "python_random": random.getstate()})


def gather_weights(fabric: Fabric, model: nn.Module, about: Mapping[str, Any]) -> Checkpoint:
    """Return only the parameters and buffers of a model, like `gather_state`."""
    return Checkpoint(_gathered_parts(fabric, _weights(model)), about)


def restore_weights(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Restore the parameters and buffers of a model, in place."""
    current = model.state_dict()
    stored = checkpoint.part("model.")
    model.load_state_dict({name: placed_like(tensor, current[name]) for name, tensor in stored.items()})


def restore_state(
    fabric: Fabric,
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    window: Tensor,
) -> None:
    """Restore the state that `gather_state` returned: `model`, `optimizers` and `window` change in place.

    The number of processes may differ; additional processes keep their current random states.
    """
    restore_weights(checkpoint, model)
    owners = _owners(optimizers)
    for name, parameter in model.named_parameters():
        moments = checkpoint.part(f"optimizer.{name}.")
        owners[parameter].state[parameter] = {
            key: placed_like(tensor, parameter) for key, tensor in moments.items()
        }
    window.copy_(checkpoint.tensors["metrics.window"])
    for kind, (_, set_random) in _random_states(fabric.device).items():
        state = checkpoint.tensors.get(_random_name(kind, fabric.global_rank))
        # also missing after a move to another device type, where the run is not bit-identical anyway
        if state is not None:
            set_random(state)
    version, internal, gauss = checkpoint.about["python_random"]
    random.setstate((version, tuple(internal), gauss))


def carried_state(checkpoint: Checkpoint, like: Tree, device: torch.device) -> Tree:
    """Return the argument `carried` of `gather_state` on a device, in the structure of the state `like`."""
    return map_tree(lambda part: part.to(device), filled(like, "carried", checkpoint.tensors))


def packed(tree: Any, tensors: dict[str, Tensor]) -> Any:
    """Return a tree of tensors, arrays and plain values as JSON values; tensors go to a dict by number."""
    if isinstance(tree, Tensor) or hasattr(tree, "__array__"):
        name = str(len(tensors))
        tensors[name] = torch.as_tensor(tree)
        return {"tensor": name, "array": not isinstance(tree, Tensor)}
    if isinstance(tree, Mapping):
        return {"items": [[packed(key, tensors), packed(value, tensors)] for key, value in tree.items()]}
    if isinstance(tree, (tuple, list)):
        return {"tuple": isinstance(tree, tuple), "list": [packed(part, tensors) for part in tree]}
    return tree


def unpacked(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the tree that `packed` made JSON of; named tuples become tuples."""
    if not isinstance(tree, dict):
        return tree
    if "tensor" in tree:
        return tensors[tree["tensor"]].numpy() if tree["array"] else tensors[tree["tensor"]]
    if "items" in tree:
        return {unpacked(key, tensors): unpacked(value, tensors) for key, value in tree["items"]}
    parts = [unpacked(part, tensors) for part in tree["list"]]
    return tuple(parts) if tree["tuple"] else parts


def _weights(model: nn.Module) -> dict[str, Tensor]:
    # must be the first call: state_dict() reshards the parameters that the forward pass left gathered
    return {f"model.{name}": tensor for name, tensor in model.state_dict().items()}


def _gathered_parts(fabric: Fabric, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, part in parts.items():
        # all processes take part in gathering a tensor, only the first keeps it
        tensor = whole(part)
        if fabric.is_global_zero:
            tensors[name] = tensor.cpu()
    return tensors


def _random_name(kind: str, rank: int) -> str:
    return f"random.{kind}.{rank}" if rank else f"random.{kind}"


def _random_states(device: torch.device) -> dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], None]]]:
    """Return the functions that get and set the random state, for the CPU and for the type of `device`."""
    states: dict[str, Any] = {"cpu": (torch.get_rng_state, torch.set_rng_state)}
    if device.type != "cpu":
        module = torch.get_device_module(device)
        states[device.type] = (module.get_rng_state, module.set_rng_state)
    return states


def _owners(optimizers: Sequence[torch.optim.Optimizer]) -> dict[nn.Parameter, torch.optim.Optimizer]:
    return {
        parameter: optimizer
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
