"""What a run consists of between two steps, as named tensors, and back; and what makes it repeatable."""

import os
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from linrec.train.checkpoint import Checkpoint


def gather_state(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], window: Tensor, about: Mapping[str, Any]
) -> Checkpoint:
    """Collect all that the following steps depend on.

    Args:
        model: its parameters and buffers become "model.<name>".
        optimizers: their moments become "optimizer.<parameter's name>.<moment>".
        window: sums of the metrics since they were last logged, "metrics.window".
        about: step, position, configuration; Python's random state is added.
    """
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    owners = _owners(optimizers)
    for name, parameter in model.named_parameters():
        for moment, tensor in owners[parameter].state[parameter].items():
            tensors[f"optimizer.{name}.{moment}"] = tensor
    tensors["metrics.window"] = window
    tensors["random.cpu"] = torch.get_rng_state()
    if window.device.type != "cpu":
        tensors[f"random.{window.device.type}"] = torch.get_device_module(window.device).get_rng_state()
    return Checkpoint(tensors, {**about, "python_random": random.getstate()})


def restore_state(
    checkpoint: Checkpoint, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], window: Tensor
) -> None:
    """Put everything back to where `gather_state` found it; the arguments are changed in place."""
    model.load_state_dict(checkpoint.part("model."))
    owners = _owners(optimizers)
    for name, parameter in model.named_parameters():
        moments = checkpoint.part(f"optimizer.{name}.")
        owners[parameter].state[parameter] = {
            key: tensor.to(parameter.device) for key, tensor in moments.items()
        }
    window.copy_(checkpoint.tensors["metrics.window"])
    torch.set_rng_state(checkpoint.tensors["random.cpu"])
    on_device = checkpoint.tensors.get(f"random.{window.device.type}")
    # absent when the run moves to another kind of device, where it cannot go on bit for bit anyway
    if window.device.type != "cpu" and on_device is not None:
        torch.get_device_module(window.device).set_rng_state(on_device)
    version, internal, gauss = checkpoint.about["python_random"]
    random.setstate((version, tuple(internal), gauss))


def _owners(optimizers: Sequence[torch.optim.Optimizer]) -> dict[nn.Parameter, torch.optim.Optimizer]:
    return {
        parameter: optimizer
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def seed_all(seed: int) -> None:
    """Seed torch on every device, and Python."""
    torch.manual_seed(seed)
    random.seed(seed)


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Make torch choose deterministic algorithms inside, and put its settings back.

    Operations that have none (a cumulative sum on CUDA, say) run as they are, without a word.

    Args:
        wanted: False changes nothing.
    """
    if not wanted:
        yield
        return
    # cuBLAS reads it once, when it is first used; torch complains without it
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    # torch puts an object with this attribute where type checkers see a module
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    # a write to every new tensor, for programs that read what they never wrote
    settings.fill_uninitialized_memory = False
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation")
            yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        settings.fill_uninitialized_memory = fill


@contextmanager
def matmul_precision(wanted: str) -> Iterator[None]:
    """Set torch's precision of float32 matrix products inside, and put it back.

    It is a choice of the configuration, so torch's advice to choose otherwise is not passed on.

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
