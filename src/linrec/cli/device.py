"""The device that a command computes on."""

import torch

from linrec.errors import ConfigError
from linrec.literals import DeviceName


def device_of(name: DeviceName) -> torch.device:
    """Return the device that --device names; "auto" takes CUDA, then MPS, then the CPU.

    Raises:
        ConfigError: the device is not available.
    """
    there = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if name == "auto":
        return torch.device(next(kind for kind, is_there in there.items() if is_there))
    if not there[name]:
        raise ConfigError(
            f"there is no {name} device here; pass --device cpu, or auto to use the best available device."
        )
    return torch.device(name)
