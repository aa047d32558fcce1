"""The state of a run between two steps as named tensors, and settings for reproducible runs."""

import os
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from linrec.generation.state import filled, named
from linrec.lab.train.checkpoint import Checkpoint
from linrec.lab.train.fabric import Fabric
from linrec.lab.train.muon import Muon
from linrec.lab.train.processes import gathered
from linrec.lab.train.sharding import placed_like, whole
from linrec.trees import Tree, map_tree


def gather_state(
    fabric: Fabric,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    window: Tensor,
    about: Mapping[str, Any],
    carried: Tree = None,
) -> Checkpoint:
    """Return the complete state of a run in the first process; all processes must call this.

    Args:
        fabric: the Fabric of the run. Random states become "random.<device>", and with ".<rank>" in all
            processes after the first.
        model: the model, whose parameters and buffers become "model.<name>".
        optimizers: the optimisers, whose state tensors become "optimizer.<parameter's name>.<moment>".
        window: sums of the metrics since the last log entry, "metrics.window".
        about: step, position, configuration; Python's random state is added.
        carried: the state that the next batch begins with, whose tensors become "carried.<name>", if any.
    """
    parts = _weights(model)
    owners = _owners(optimizers)
    for name, parameter in model.named_parameters():
        for moment, tensor in owners[parameter].state[parameter].items():
            parts[f"optimizer.{name}.{moment}"] = tensor
    parts["metrics.window"] = window
    parts |= named(carried, "carried")
    tensors = _gathered_parts(fabric, parts)
    for kind, (get_random, _) in _random_states(fabric.device).items():
        for rank, state in enumerate(gathered(fabric, get_random())):
            tensors[_random_name(kind, rank)] = state
    return Checkpoint(tensors, {**about, "python_random": random.getstate()})


def gather_weights(fabric: Fabric, model: nn.Module, about: Mapping[str, Any]) -> Checkpoint:
    """Return only the parameters and buffers of a model, "model.<name>", like `gather_state`."""
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
    """Return the argument `carried` of `gather_state`, on a device.

    Args:
        checkpoint: a checkpoint of a run that carries states.
        like: a state of the model, such as its initial state, with the same structure.
        device: where the batches are.
    """
    return map_tree(lambda part: part.to(device), filled(like, "carried", checkpoint.tensors))


def moments(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Set[str]]:
    """Return the names of the optimiser's state tensors for every parameter, by the parameter's name."""
    owners = _owners(optimizers)
    adamw, muon = {"step", "exp_avg", "exp_avg_sq"}, {"momentum"}
    return {
        name: muon if isinstance(owners[parameter], Muon) else adamw
        for name, parameter in model.named_parameters()
    }


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


def seed_all(seed: int) -> None:
    """Seed torch on every device, and Python, so that all processes build the same model."""
    torch.manual_seed(seed)
    random.seed(seed)


def seed_dropout(seed: int, rank: int) -> None:
    """Seed torch differently in every process, for different dropout masks; call after building the model."""
    if rank > 0:
        torch.manual_seed(int(np.random.SeedSequence([seed, rank]).generate_state(1, np.uint64)[0]))


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Make torch use deterministic algorithms within the context, and restore its settings afterwards.

    Operations without a deterministic algorithm, such as a cumulative sum on CUDA, run without a warning.

    Args:
        wanted: False leaves torch's settings unchanged.
    """
    if not wanted:
        yield
        return
    # cuBLAS reads this variable on its first use; without it, torch raises an error
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    # at run time, torch replaces this module by an object with the attribute below
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    # filling every uninitialised tensor costs time, and only helps programs that read uninitialised memory
    settings.fill_uninitialized_memory = False
    try:
        with warnings.catch_warnings():
            for end in ("does not have a deterministic implementation", "to a non-deterministic algorithm"):
                warnings.filterwarnings("ignore", message=f".*{end}")
            yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        settings.fill_uninitialized_memory = fill


@contextmanager
def matmul_precision(wanted: str) -> Iterator[None]:
    """Set torch's precision of float32 matrix products within the context, and restore it afterwards.

    Torch's warning about TensorFloat32 is hidden, because the configuration chooses the precision.

    Args:
        wanted: "highest" or "high", as for `torch.set_float32_matmul_precision`.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(wanted)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
            yield
    finally:
        torch.set_float32_matmul_precision(before)
