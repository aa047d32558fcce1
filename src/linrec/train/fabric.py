"""The one place that imports Lightning Fabric, which comes in two packages."""

import logging
import os
from typing import Literal

import torch

try:
    from lightning_fabric import Fabric
except ModuleNotFoundError:
    from lightning.fabric import Fabric  # type: ignore[import-not-found,no-redef]

from linrec.train.config import LoopConfig
from linrec.train.errors import ConfigError

# advice to choose another precision of matrix products, whatever `loop.matmul_precision` says
for _package in ("lightning_fabric", "lightning.fabric"):
    logging.getLogger(f"{_package}.utilities.rank_zero").addFilter(
        lambda record: "Tensor Cores" not in record.getMessage()
    )

__all__ = ["Fabric", "make_fabric", "uses_compile"]


def make_fabric(config: LoopConfig) -> Fabric:
    """Return Fabric on the device and in the precision that the configuration asks for.

    Raises:
        ConfigError: the device is not there, or several processes are to train one model.
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1:
        raise ConfigError(
            f"training runs in one process; got WORLD_SIZE={processes}. Start it without torchrun, and give "
            "each run a device with CUDA_VISIBLE_DEVICES."
        )
    return Fabric(accelerator=_device_type(config.device), devices=1, precision=config.precision)


def uses_compile(config: LoopConfig, device: torch.device) -> bool:
    """Tell whether to compile: when asked to, and of itself on CUDA, where launching kernels costs most.

    Example:
        >>> uses_compile(LoopConfig(compile="auto"), torch.device("cpu"))
        False
    """
    return config.compile == "on" or (config.compile == "auto" and device.type == "cuda")


def _device_type(wanted: str) -> Literal["cpu", "cuda", "mps"]:
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if (wanted == "cuda" and not cuda) or (wanted == "mps" and not mps):
        raise ConfigError(
            f"there is no {wanted} device here; pass --loop.device cpu, or auto to take what there is."
        )
    if wanted == "cuda" or (wanted == "auto" and cuda):
        return "cuda"
    if wanted == "mps" or (wanted == "auto" and mps):
        return "mps"
    return "cpu"
